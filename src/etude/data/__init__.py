"""Data: what turns text into ids and back, and what models learn from.

`tokenizer` (text <-> ids), `render` (conversations <-> ids), `corpus` (real functions with planted faults and their
fixes). numpy only; the tokenizer library is loaded in `tokenizer.py` alone.
"""
