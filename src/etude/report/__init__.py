"""Report: a run as one HTML file that needs no network, and the picture of what it learned.

`html` assembles from `result` (before and after), `series` and `charts` (curves) and `attempts` (episodes to read);
`picture` draws the SVG of a README. The only room that writes HTML and plots; it reads a run and never changes it.
"""
