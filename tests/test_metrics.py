import contextlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from etude import metrics
from etude.errors import StoreError
from etude.metrics import ConsoleRecorder, JsonlRecorder, Tee, progress, read_rows
from etude.protocols import Recorder

STEP = {
    "step": 3,
    "wall_s": 65.0,
    "reward_mean": 0.251,
    "solve_rate": 0.31,
    "staleness_mean": 0.9,
    "tokens_per_s": 2950,
}


def plain_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=200)


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, force_interactive=True, width=100, legacy_windows=False)


def text_of(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


# Files


def test_rows_come_back_in_order_with_kind_and_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    start = time.time()
    recorder = JsonlRecorder(path)
    recorder.record("step", {"step": 1, "loss": 0.5, "note": "a\nb", "missing": None})
    recorder.record("eval", {"pass1": 0.25})
    recorder.close()
    rows = read_rows(path)
    assert [(row["kind"], row["row"]) for row in rows] == [
        ("step", {"step": 1, "loss": 0.5, "note": "a\nb", "missing": None}),
        ("eval", {"pass1": 0.25}),
    ]
    assert all(start <= row["time"] <= time.time() for row in rows)
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["step", "eval"]


def test_numbers_of_numpy_and_numbers_that_json_lacks_are_written(tmp_path: Path) -> None:
    recorder = JsonlRecorder(tmp_path / "m")
    recorder.record("step", {"a": np.float32(0.5), "b": np.int64(2), "c": math.nan, "d": math.inf})  # type: ignore[dict-item]
    recorder.close()
    assert read_rows(tmp_path / "m")[0]["row"] == {"a": 0.5, "b": 2, "c": None, "d": None}


def test_a_value_that_is_no_number_or_text_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    recorder = JsonlRecorder(tmp_path / "m")
    with pytest.raises(TypeError, match="object"):
        recorder.record("step", {"a": object()})  # type: ignore[dict-item]
    recorder.close()
    assert read_rows(tmp_path / "m") == []


def test_a_cut_last_line_is_ignored_and_cut_off_when_writing_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "m"
    recorder = JsonlRecorder(path)
    for step in range(3):
        recorder.record("step", {"step": step, "text": "x" * 100_000})
    recorder.close()
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, len(whole) - 1) + 1
    for cut in (last, last + 1, last + 70_000, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert [row["row"]["step"] for row in read_rows(path)] == [0, 1]
        recorder = JsonlRecorder(path)
        recorder.record("step", {"step": 9})
        recorder.close()
        assert [row["row"]["step"] for row in read_rows(path)] == [0, 1, 9]


def test_a_file_that_is_one_cut_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('{"time": 1, "ki')
    assert read_rows(path) == []
    JsonlRecorder(path).close()
    assert path.read_bytes() == b""


def test_kill_9_loses_no_row_that_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "m"
    source = (
        "import sys; from pathlib import Path; from etude.metrics import JsonlRecorder\n"
        "recorder = JsonlRecorder(Path(sys.argv[1]))\n"
        "for step in range(10**9):\n"
        "    recorder.record('step', {'step': step})\n"
        "    if step == 200: print('ready', flush=True)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", source, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    steps = [row["row"]["step"] for row in read_rows(path)]
    assert len(steps) >= 201
    assert steps == list(range(len(steps)))


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"time": 1, "kind": 2, "row": {}}', "[" * 100_000, "\xff"])
def test_a_line_in_the_middle_that_is_no_row_is_named(tmp_path: Path, line: str) -> None:
    good = '{"time":1,"kind":"step","row":{}}\n'
    (tmp_path / "m").write_bytes((good + line + "\n" + good).encode("latin-1"))
    with pytest.raises(StoreError, match="line 2 is not a row"):
        read_rows(tmp_path / "m")


def test_no_file_has_no_rows_and_a_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "m") == []
    with pytest.raises(StoreError, match="cannot write"):
        JsonlRecorder(tmp_path / "missing" / "m")
    with pytest.raises(StoreError, match="cannot read"):
        read_rows(tmp_path)


def test_a_full_disk_is_a_store_error_that_says_so() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    recorder = JsonlRecorder(Path("/dev/full"))
    with pytest.raises(StoreError, match="cannot write") as caught:
        recorder.record("step", {"step": 1})
    assert "No space" in str(caught.value.cause)
    recorder.close()


def test_a_tee_gives_every_row_to_each_recorder(tmp_path: Path) -> None:
    files = [JsonlRecorder(tmp_path / name) for name in "ab"]
    tee: Recorder = Tee(*files)
    tee.record("step", {"step": 1})
    for file in files:
        file.close()
    assert [read_rows(file.path)[0]["row"] for file in files] == [{"step": 1}] * 2


# The terminal


def test_away_from_a_terminal_each_step_is_one_plain_line() -> None:
    console = plain_console()
    with ConsoleRecorder(330, console=console) as recorder:
        recorder.record("step", STEP)
        recorder.record("engine", {"running": 3})
        recorder.record("step", {"step": 4})
        recorder.record("eval", {"when": "before", "pass1": 0.283, "passk": 0.58, "k": 8, "n": 400})
    assert text_of(console).splitlines() == [
        "    65 s  step 3  reward +0.251  solved 31%  stale 0.90  tokens/s 2,950",
        "    65 s  step 4",
        "before training: pass@1 28.3% pass@8 58.0% on 400 tasks",
    ]


def test_tokens_per_second_follow_from_the_engine_s_counter() -> None:
    console = plain_console()
    with ConsoleRecorder(None, console=console) as recorder:
        recorder.record("step", {"step": 1, "wall_s": 10.0, "engine_sampled_tokens": 20_000})
        recorder.record("step", {"step": 2, "wall_s": 14.0, "engine_sampled_tokens": 32_000})
        recorder.record("step", {"step": 3, "wall_s": 20.0, "engine_sampled_tokens": 6_000})
    assert text_of(console).splitlines() == [
        "    10 s  step 1",
        "    14 s  step 2  tokens/s 3,000",
        "    20 s  step 3",  # the engine was started again
    ]


def test_on_a_terminal_a_panel_shows_the_clock_and_the_step_and_is_put_away() -> None:
    console = terminal()
    with ConsoleRecorder(330, console=console) as recorder:
        recorder.record("step", STEP)
        recorder.record("eval", {"when": "after", "pass1": 0.4})
        time.sleep(0.7)
    shown = text_of(console)
    assert re.search(r"[6-9]\d of 330 s", shown)
    for part in ("+0.251", "31%", "2,950", "after training: pass@1 40.0%"):
        assert part in shown, part
    assert shown.endswith("\x1b[2K") or "\x1b[2K" in shown[-40:]


def test_text_in_rows_is_never_read_as_markup() -> None:
    console = plain_console()
    with ConsoleRecorder(None, console=console) as recorder:
        recorder.record("eval", {"when": "[red]x[/red][/]", "pass1": 0.4})
    assert "[red]x[/red][/]" in text_of(console)


def test_a_plain_bar_says_start_and_end_and_not_every_step() -> None:
    console = plain_console()
    with progress("grade [b]", total=500, console=console) as bar:
        for _ in range(500):
            bar.advance()
    assert text_of(console).splitlines() == ["grade [b] 0 of 500", "grade [b] 500 of 500"]


def test_a_plain_bar_speaks_again_after_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "PLAIN_EVERY_S", 0.0)
    console = plain_console()
    with progress("read", console=console) as bar:
        bar.advance(2)
        bar.describe("write")
    assert text_of(console).splitlines() == ["read 0", "read 2", "write 2"]


def test_a_bar_that_fails_says_how_far_it_came() -> None:
    console = plain_console()
    with contextlib.suppress(ZeroDivisionError), progress("grade", total=5, console=console) as bar:
        bar.advance(3)
        raise ZeroDivisionError
    assert text_of(console).splitlines()[-1] == "grade 3 of 5"


def test_a_quiet_bar_counts_and_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with progress("grade", total=5, quiet=True) as bar:
        bar.advance(3)
    assert bar.done == 3
    assert capfd.readouterr() == ("", "")


def test_a_bar_on_a_terminal_shows_how_much_is_done_also_inside_a_panel() -> None:
    console = terminal()
    with ConsoleRecorder(None, console=console), progress("grade [b]", total=5, console=console) as bar:
        bar.advance(3)
        time.sleep(0.4)
    shown = text_of(console)
    assert "grade [b]" in shown
    assert "3/5" in shown


def test_progress_speaks_on_stderr_and_stdout_stays_data() -> None:
    source = (
        "from etude.metrics import ConsoleRecorder, progress\n"
        "with ConsoleRecorder(9) as recorder:\n    recorder.record('step', {'step': 1})\n"
        "with progress('grade', total=1) as bar:\n    bar.advance(); print('data')\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "data\n"
    assert done.stderr.splitlines() == ["     0 s  step 1", "grade 0 of 1", "grade 1 of 1"]


def test_a_row_that_a_full_disk_takes_in_part_names_the_kernels_reason(tmp_path: Path) -> None:
    # a limit on the file's size does what a disk's last free page does: a part is taken without a word
    source = (
        "import resource, sys, pathlib; from etude.metrics import JsonlRecorder\n"
        "recorder = JsonlRecorder(pathlib.Path(sys.argv[1]))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))\n"
        "recorder.record('step', {'step': 1, 'text': 'x' * 100})"
    )
    done = subprocess.run([sys.executable, "-c", source, str(tmp_path / "rows")], capture_output=True, text=True)
    assert "StoreError" in done.stderr
    assert "File too large" in done.stderr
    assert (tmp_path / "rows").stat().st_size == 40
    assert read_rows(tmp_path / "rows") == []
