import asyncio
from collections.abc import Awaitable, Callable

import pytest

from agent.scenes import FragilePool, in_loop, real_pool
from etude.errors import SandboxDiedError, SandboxError
from etude.protocols import ExecResult, Sandbox
from etude.sandbox import memo
from etude.sandbox.memo import MemoPool

FILES = {"solution.py": "x = 1\n", "lib/part.py": "y = 2\n"}
SHOW = "import os\nos.write(3, open('solution.py', 'rb').read())\n"


def played(job: Callable[[MemoPool], Awaitable[object]], **breaks: object) -> tuple[object, FragilePool]:
    """What a job gave, and the pool below, all of whose sandboxes must be closed again."""

    async def run() -> tuple[object, FragilePool]:
        inner = FragilePool(real_pool(), **breaks)  # type: ignore[arg-type]
        result = await job(MemoPool(inner))
        assert inner.open == 0
        return result, inner

    return in_loop(run())


async def ask(pool: MemoPool, source: str = SHOW, *, text: str | None = None, stdin: bytes = b"") -> ExecResult:
    sandbox = await pool.acquire(FILES)
    try:
        if text is not None:
            await sandbox.write_file("solution.py", text.encode())
        return await sandbox.run_python(source, stdin=stdin, timeout_s=5.0)
    finally:
        await sandbox.close()


def test_files_alone_need_no_sandbox() -> None:
    async def job(pool: MemoPool) -> None:
        sandbox = await pool.acquire(FILES)
        await sandbox.write_file("solution.py", "x = 'é'\n".encode())
        await sandbox.write_file("new/one.txt", b"1")
        assert await sandbox.read_file("solution.py") == "x = 'é'\n".encode()
        assert await sandbox.list_files() == ("lib/part.py", "new/one.txt", "solution.py")
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("absent.py")
        other = await sandbox.fork()
        await other.write_file("solution.py", b"")
        assert await sandbox.read_file("solution.py") != b""

    assert played(job)[1].acquired == 0


def test_equal_questions_cost_one_sandbox_and_others_their_own() -> None:
    async def job(pool: MemoPool) -> None:
        results = await asyncio.gather(*(ask(pool) for _ in range(8)))
        assert {result.result for result in results} == {b"x = 1\n"}
        assert pool.answered == 7
        assert (await ask(pool, text="x = 3\n")).result == b"x = 3\n"
        assert (await ask(pool, stdin=b"1")).result == b"x = 1\n"
        assert (await ask(pool, SHOW + "\n")).result == b"x = 1\n"

    assert played(job)[1].acquired == 4


@pytest.mark.parametrize(
    "source", ["raise SystemExit(3)", "import os\nos.kill(os.getpid(), 9)", "import os\nos.write(3, b'x' * 20_000)"]
)
def test_what_did_not_end_well_or_is_large_is_run_again(source: str) -> None:
    async def job(pool: MemoPool) -> None:
        for _ in range(2):
            await asyncio.gather(ask(pool, source), ask(pool, source))
        assert pool.answered == 0

    assert played(job)[1].acquired == 4


def test_an_endless_loop_that_its_own_timer_ends_is_not_run_again() -> None:
    endless = "import signal\nsignal.setitimer(signal.ITIMER_PROF, 0.05)\nwhile True:\n    pass\n"

    async def job(pool: MemoPool) -> None:
        assert [(await ask(pool, endless)).exit_code for _ in range(2)] == [-27, -27]

    assert played(job)[1].acquired == 1


def test_after_a_run_the_sandbox_is_a_real_one_with_what_the_run_left() -> None:
    async def job(pool: MemoPool) -> None:
        sandbox = await pool.acquire(FILES)
        await sandbox.write_file("solution.py", b"x = 5\n")
        await sandbox.run_python("open('made', 'w').write('1')", timeout_s=5.0)
        assert await sandbox.read_file("made") == b"1"
        assert await sandbox.read_file("solution.py") == b"x = 5\n"
        assert "made" in await sandbox.list_files()
        again = await sandbox.run_python("import os\nos.write(3, open('made', 'rb').read())", timeout_s=5.0)
        assert again.result == b"1"
        assert (await sandbox.exec(["cat", "made"], timeout_s=5.0)).stdout == b"1"
        await sandbox.close()
        fresh = await pool.acquire({**FILES, "solution.py": "x = 5\n"})
        with pytest.raises(FileNotFoundError):
            await fresh.read_file("made")

    played(job)


@pytest.mark.parametrize(
    "path", ["../up", "/etc/passwd", "lib", "solution.py/x", "./solution.py", "a//b", "a\0b", "x" * 300]
)
def test_a_path_that_is_not_plain_is_for_the_sandbox_to_judge(path: str) -> None:
    async def job(pool: MemoPool) -> list[str]:
        seen = []
        for sandbox in (await pool.acquire(FILES), await pool.inner.acquire(FILES)):
            try:
                seen.append((await sandbox.read_file(path)).decode())
            except (OSError, ValueError) as error:
                seen.append(type(error).__name__)
            await sandbox.close()
        return seen

    (here, there), inner = played(job)  # type: ignore[misc]
    assert here == there
    assert inner.acquired == 2


@pytest.mark.parametrize("files", [{"../up": ""}, {"a" * 200: ""}, {"big": "x" * (memo.MAX_WORKSPACE_BYTES + 1)}])
def test_a_workspace_that_only_a_sandbox_can_judge_is_laid_out_at_once(files: dict[str, str]) -> None:
    async def job(pool: MemoPool) -> None:
        try:
            await (await pool.acquire(files)).close()
        except OSError:
            assert "../up" in files

    assert played(job)[1].acquired == 1


def test_large_or_binary_contents_go_to_a_real_sandbox() -> None:
    async def job(pool: MemoPool) -> None:
        for data in (b"\xff\xfe", b"x" * (memo.MAX_WORKSPACE_BYTES + 1)):
            sandbox = await pool.acquire(FILES)
            await sandbox.write_file("solution.py", data)
            assert await sandbox.read_file("solution.py") == data
            await sandbox.close()

    assert played(job)[1].acquired == 2


def test_no_sandbox_to_be_had_is_not_a_sandbox_that_died() -> None:
    async def job(pool: MemoPool) -> None:
        with pytest.raises(SandboxError) as caught:
            await ask(pool)
        assert not isinstance(caught.value, SandboxDiedError)
        assert (await ask(pool)).result == b"x = 1\n"  # the failure is not remembered

    played(job, refuse=1)


def test_siblings_of_one_that_gave_up_ask_for_themselves() -> None:
    async def job(pool: MemoPool) -> None:
        slow = SHOW + "import time\ntime.sleep(0.3)\n"
        first = asyncio.create_task(ask(pool, slow))
        await asyncio.sleep(0.1)
        others = [asyncio.create_task(ask(pool, slow)) for _ in range(2)]
        await asyncio.sleep(0.05)
        first.cancel()
        assert [result.result for result in await asyncio.gather(*others)] == [b"x = 1\n"] * 2

    played(job)


def test_calls_side_by_side_share_the_sandbox_that_the_first_takes() -> None:
    async def job(pool: MemoPool) -> None:
        sandbox = await pool.acquire(FILES)
        await asyncio.gather(*(sandbox.exec(["true"], timeout_s=5.0) for _ in range(3)))
        await sandbox.close()

    assert played(job)[1].acquired == 1


def test_old_answers_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "MAX_ANSWERS", 2)

    async def job(pool: MemoPool) -> None:
        for text in ("1", "2", "3", "3", "1"):
            await ask(pool, text=text)
        assert pool.answered == 1

    assert played(job)[1].acquired == 4


def test_it_is_a_sandbox() -> None:
    async def job(pool: MemoPool) -> None:
        assert isinstance(await pool.acquire(FILES), Sandbox)

    played(job)
