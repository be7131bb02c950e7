import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from etude.errors import RunError, StoreError
from etude.report.html import build_report
from report.made_run import HOSTILE, begin, finish, record_episodes, record_steps


class Page(HTMLParser):
    """Elements, and the text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._silent = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._silent = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._silent = False

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.text += data

    def count(self, tag: str, kind: str = "") -> int:
        return sum(name == tag and kind in (attrs.get("class") or "") for name, attrs in self.elements)


def whole_run(folder: Path, text: str = "") -> Path:
    begin(folder)
    record_steps(folder)
    record_episodes(folder, text=text)
    finish(folder)
    return folder


def test_a_finished_run_shows_result_curves_time_and_episodes(tmp_path: Path) -> None:
    path = build_report(whole_run(tmp_path / "run"))
    assert path == tmp_path / "run" / "report.html"
    assert (tmp_path / "run" / "learning.svg").read_text().startswith("<svg ")
    page = Page(path.read_text())
    for text in (
        "Training raised", "barred from finishing until a test passes", "28.3%", "36.5%", "41.2%", "+9.6 to +16.2",
        "60 optimizer steps", "Staleness", "Mismatch", "Where the time went", "Repair clamp0.", "Patch", "verify",
        "clamp(-1, 0, 5) -> 5, expected 0", 'path = "etude-nano"', "versions.torch", "2001-09-09 01:46 UTC",
    ):  # fmt: skip
        assert text in page.text, text
    assert "Unfinished" not in page.text
    assert page.count("figure") == 14
    assert page.count("details", "task") == 6
    assert page.count("article", "before") == 11
    assert page.count("tr", "add") > 0


def test_the_page_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    page = Page(build_report(whole_run(tmp_path / "run")).read_text())
    for tag, attrs in page.elements:
        assert tag not in ("link", "iframe", "object", "embed", "base", "img", "form"), tag
        assert not {"src", "href", "action", "srcset", "background"} & attrs.keys(), (tag, attrs)
    policy = next(attrs["content"] for tag, attrs in page.elements if attrs.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in policy
    assert "unsafe-inline" not in policy.split("style-src")[0]


def test_what_an_agent_wrote_is_text_and_nothing_else(tmp_path: Path) -> None:
    page = Page(build_report(whole_run(tmp_path / "run", HOSTILE)).read_text())
    clean = Page(build_report(whole_run(tmp_path / "clean")).read_text())
    assert page.text.count(HOSTILE) > 50
    assert {tag for tag, _ in page.elements} == {tag for tag, _ in clean.elements}
    assert page.count("script") == clean.count("script") == 3
    known = {name for _, attrs in clean.elements for name in attrs}
    assert {name for _, attrs in page.elements for name in attrs} == known


def test_hostile_names_in_the_run_s_own_files_are_text_too(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "run")
    (run / "run.json").write_text('{"name": "<b>x</b>", "machine": {"</dl>": ["<i>"]}}')
    (run / "recipe.toml").write_text("</pre><script>1</script>")
    page = Page(build_report(run).read_text())
    assert page.count("i") == Page(build_report(whole_run(tmp_path / "other")).read_text()).count("i")
    assert page.text.count("<b>x</b>") == 3
    assert page.count("script") == 3
    assert "</pre><script>1</script>" in page.text


def test_a_run_without_anything_yet_says_what_is_missing(tmp_path: Path) -> None:
    page = Page(build_report(begin(tmp_path / "run")).read_text())
    for text in (
        "no result yet",
        "Unfinished",
        "No optimizer step is recorded",
        "No episodes are on disk",
        "run.json"[:3],
    ):
        assert text in page.text, text
    assert page.count("script") == 1


def test_a_run_without_result_shows_its_curves(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    record_steps(run, 7)
    page = Page(build_report(run).read_text())
    assert "training got to step 7" in page.text
    assert page.count("figure") == 14


def test_a_report_can_be_made_again_and_again(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    build_report(run)
    finish(run)
    assert "Training raised" in build_report(run).read_text()
    assert not list(run.glob(".*"))


def test_a_folder_that_is_no_run_and_files_that_are_broken_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run"):
        build_report(tmp_path)
    run = whole_run(tmp_path / "run")
    for name, error in (("metrics.jsonl", StoreError), ("result.json", RunError), ("run.json", RunError)):
        shutil.copy(run / name, tmp_path / "kept")
        (run / name).write_text("broken\n")
        with pytest.raises(error):
            build_report(run)
        shutil.copy(tmp_path / "kept", run / name)
    build_report(run)


@pytest.mark.slow
def test_a_browser_draws_the_curves_and_runs_nothing_of_the_agent_s(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium here")
    path = build_report(whole_run(tmp_path / "run", HOSTILE))
    flags = (
        "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
        "disable-component-update disable-sync virtual-time-budget=5000 dump-dom"
    )
    switches = [f"--{name}" for name in flags.split()]
    command = [browser, *switches, f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title is not None
    assert title.group(1) == "run · Etude"
    assert dom.count("main-svg") >= 14
    assert dom.count("<img") == 0
