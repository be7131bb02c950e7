import numpy as np
import pytest

from etude.agent.window import Window, join_runs
from etude.errors import EngineError
from etude.protocols import TokenChunk
from etude.types import KVEpoch, Routes, Run, StopReason, Version

V1, V2, V3 = (Version(incarnation=1, n=n, step=n) for n in (1, 2, 3))


def epoch(first: int, *runs: tuple[int, Version]) -> KVEpoch:
    return KVEpoch(first=first, runs=tuple(Run(start=start, version=version) for start, version in runs))


def routes(*marks: int, invalid: tuple[int, ...] = ()) -> Routes:
    experts = np.array(marks, np.uint8)[:, None, None].repeat(2, 1)
    return Routes(experts=experts, valid=np.array([row not in invalid for row in range(len(marks))]))


def chunk(
    count: int,
    version: Version,
    start: int,
    epochs: tuple[KVEpoch, ...] = (),
    taken: Routes | None = None,
    row: int = 0,
) -> TokenChunk:
    return TokenChunk(
        request_id="r",
        ids=np.arange(count, dtype=np.int32),
        logprobs=np.full(count, -1.0, np.float32),
        versions=(Run(start=start, version=version),),
        stop=StopReason.END,
        kv_epochs=epochs,
        routes=taken,
        routes_start=row,
    )


def test_runs_that_repeat_a_version_are_joined() -> None:
    assert join_runs([Run(start=3, version=V1), Run(start=5, version=V1), Run(start=8, version=V2)]) == [
        Run(start=3, version=V1),
        Run(start=8, version=V2),
    ]


def test_kv_that_lives_on_stays_one_epoch() -> None:
    window = Window()
    window.append([0] * 4)
    window.add(chunk(3, V1, 4, (epoch(4, (0, V1)),)), start=4)
    window.append([0] * 2)
    # the last sampled token (position 6) is computed by the next request, here already by version 2
    window.add(chunk(2, V2, 9, (epoch(9, (0, V1), (6, V2)),)), start=9)
    assert window.context().kv_epochs == (epoch(4, (0, V1), (6, V2)),)


def test_a_prefill_from_the_start_opens_an_epoch_at_its_first_sampled_token() -> None:
    window = Window()
    window.append([0] * 4)
    window.add(chunk(3, V1, 4, (epoch(4, (0, V1)),)), start=4)
    window.append([0] * 2)
    window.add(chunk(2, V2, 9, (epoch(9, (0, V2)),)), start=9)
    assert window.context().kv_epochs == (epoch(4, (0, V1)), epoch(9, (0, V2)))


def test_an_engine_that_repeats_old_epochs_adds_nothing() -> None:
    window = Window()
    window.append([0] * 4)
    window.add(chunk(3, V1, 4, (epoch(4, (0, V1)),)), start=4)
    window.append([0] * 2)
    window.add(chunk(2, V2, 9, (epoch(4, (0, V1)), epoch(9, (0, V2)))), start=9)
    window.append([0] * 2)
    history = (epoch(4, (0, V1)), epoch(9, (0, V2), (12, V3)))
    window.add(chunk(2, V3, 13, history), start=13)
    assert window.context().kv_epochs == history


def test_a_prefill_in_mid_reply_opens_an_epoch_there() -> None:
    window = Window()
    window.append([0] * 4)
    window.add(chunk(6, V1, 4, (epoch(4, (0, V1)), epoch(7, (0, V2)))), start=4)
    window.append([0])
    window.add(chunk(1, V2, 11, (epoch(11, (0, V2)),)), start=11)
    assert window.context().kv_epochs == (epoch(4, (0, V1)), epoch(7, (0, V2)))


def test_a_route_keeps_the_version_that_the_first_later_token_saw() -> None:
    window = Window()
    window.append([0] * 3)
    window.add(chunk(2, V1, 3, taken=routes(1, 1, 1, 1)), start=3)
    window.append([0])
    window.add(chunk(2, V2, 6, taken=routes(2, 2, 2, 2, 2, 2, 2)), start=6)  # a re-prefill of everything
    context = window.context()
    assert context.routes is not None
    assert context.routes.experts[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 2, 2]
    assert context.routes.valid.all()
    assert len(context.routes.valid) == len(context.ids) - 1


def test_rows_that_nobody_recorded_are_invalid() -> None:
    window = Window()
    window.append([0] * 3)
    window.add(chunk(2, V1, 3, taken=routes(1, 1, invalid=(0,)), row=1), start=3)
    window.append([0] * 2)
    window.add(chunk(1, V1, 7, taken=routes(5, 5), row=5), start=7)
    context = window.context()
    assert context.routes is not None
    assert context.routes.valid.tolist() == [False, False, True, False, False, True, True]


def test_a_dense_model_has_no_routes() -> None:
    window = Window()
    window.append([0])
    window.add(chunk(2, V1, 1), start=1)
    assert window.context().routes is None


@pytest.mark.parametrize(
    "bad",
    [
        TokenChunk(request_id="r", ids=np.zeros(2, np.int32), logprobs=np.zeros(1, np.float32), versions=()),
        TokenChunk(request_id="r", ids=np.zeros(1, np.int32), logprobs=np.zeros(1, np.float32), versions=()),
        chunk(1, V1, 1, taken=Routes(experts=np.zeros((2, 1, 1), np.uint8), valid=np.zeros(1, bool))),
    ],
)
def test_a_malformed_chunk_is_an_engine_error(bad: TokenChunk) -> None:
    window = Window()
    window.append([0])
    with pytest.raises(EngineError):
        window.add(bad, start=1)
