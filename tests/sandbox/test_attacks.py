"""Every attack fails, and without the protection that is said to stop it, one at least succeeds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.errors import SandboxError
from etude.sandbox.namespace import NamespaceSandbox
from sandbox.attacks import ATTACKS, PROTECTIONS, Attack, Target, target, wins
from sandbox.machine import Machine, machine
from sandbox.sabotage import take_away


@pytest.fixture(scope="module")
def at() -> Iterator[Target]:
    with target() as aimed:
        yield aimed


def succeeds(host: Machine, attack: Attack, at: Target) -> bool:
    async def run(sandbox: NamespaceSandbox) -> bool:
        try:
            async with asyncio.timeout(60):
                return await wins(attack, sandbox, at)
        except (SandboxError, OSError):
            return True

    return host.in_box(run)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_no_attack_succeeds(host: Machine, at: Target, attack: Attack) -> None:
    assert not succeeds(host, attack, at)


def test_there_are_many_each_with_a_name_and_a_known_protection() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 80
    assert {attack.protection for attack in ATTACKS} == set(PROTECTIONS)


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_without_its_protection_an_attack_succeeds(
    protection: str, at: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = take_away(protection, monkeypatch)
    with machine(recipe) as open_machine:
        stopped = [attack for attack in ATTACKS if attack.protection == protection]
        assert [attack.name for attack in stopped if succeeds(open_machine, attack, at)]


def test_the_table_of_the_docs_lists_them_all() -> None:
    page = Path(__file__).parents[2] / "docs" / "security.md"
    if not page.exists():
        pytest.skip("the tests were copied without the docs")
    text = page.read_text()
    for name, what in PROTECTIONS.items():
        tries = "; ".join(attack.name for attack in ATTACKS if attack.protection == name)
        assert f"| {name} | {what} | {tries} |" in text
    assert text.count(f"0 of {len(ATTACKS)} |") == 3
