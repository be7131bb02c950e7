from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from etude.sessions.store import SessionStore
from sessions.postgres import Postgres, postgres


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    with postgres(tmp_path_factory.mktemp("postgres")) as running:
        yield running


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a new database, once of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'sessions.db'}"
    running: Postgres = request.getfixturevalue("server")
    return running.new_database()


@pytest.fixture
def open_store() -> Iterator[Callable[..., SessionStore]]:
    opened = []

    def make(url: str, **options: object) -> SessionStore:
        opened.append(SessionStore(url, **options))
        return opened[-1]

    yield make
    for store in opened:
        store.close()
