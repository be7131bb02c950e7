from __future__ import annotations

from etude.types import Version
from etude.weights.manifests import manifest_key, pin, read_manifest
from etude.weights.store import Store, open_store
from etude.weights.verify import list_versions, verify
from weights.versions import new_publisher, publish


def filled() -> Store:
    store = open_store("memory://")
    first = new_publisher(store)
    for step in range(3):
        publish(first, step)
    publish(new_publisher(store, parent=Version(incarnation=1, n=1, step=1)), 1)
    pin(store, "reference", Version(incarnation=1, n=0, step=0), "start")
    return store


def test_the_list_says_what_serves_what_lives_and_what_is_dead() -> None:
    rows = list_versions(filled())
    assert [(row.version.name, row.state, row.pins) for row in rows] == [
        ("1.0", "alive", ("reference",)),
        ("1.1", "alive", ()),
        ("1.2", "dead", ()),
        ("2.0", "head", ()),
    ]
    assert all(row.nbytes == 182 and row.is_anchor for row in rows)


def test_a_sound_store_has_no_problems() -> None:
    found = verify(filled())
    assert found.problems == ()
    assert (found.versions, found.blobs) == (4, 6), "four whole ones, two differences"


def test_damage_is_named() -> None:
    store = filled()
    damaged, missing = (read_manifest(store, 1, n).parts[0].blob for n in (0, 1))
    store.put(damaged, store.get(damaged)[:-1] + b"!")
    store.delete(missing)
    store.delete(manifest_key(1, 0))
    problems = verify(store).problems
    assert any("pin reference: version 1.0 is gone" in problem for problem in problems)
    assert any(f"{damaged} does not hold what its name says" in problem for problem in problems)
    assert any(missing in problem for problem in problems)


def test_an_empty_store_is_sound() -> None:
    store = open_store("memory://")
    assert list_versions(store) == []
    assert verify(store).problems == ()
