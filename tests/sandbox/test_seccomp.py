from __future__ import annotations

import pyseccomp
import pytest

from etude.sandbox import seccomp


def test_no_call_is_both_allowed_and_forbidden() -> None:
    allowed = [*seccomp.ALLOWED.split(), *seccomp.UNCOUNTED.split()]
    forbidden = seccomp.FORBIDDEN.split()
    assert len(set(allowed)) == len(allowed)
    assert set(allowed).isdisjoint(forbidden)
    decided_by_argument = {"clone", "clone3", "socket", "personality", "prlimit64"}
    assert decided_by_argument.isdisjoint([*allowed, *forbidden])


@pytest.mark.parametrize("name", [*seccomp.ALLOWED.split(), *seccomp.UNCOUNTED.split(), *seccomp.FORBIDDEN.split()])
def test_every_name_is_a_system_call(name: str) -> None:
    known = [pyseccomp.resolve_syscall(arch, name) for arch in (pyseccomp.Arch.X86_64, pyseccomp.Arch.X86)]
    assert max(known) > -10_000, name


def test_the_program_is_whole_instructions_and_shorter_where_memory_is_not_counted() -> None:
    counted = seccomp.program(memory_is_counted=True)
    assert len(counted) % 8 == 0
    assert len(counted) < 8 * 4096
    assert len(seccomp.program(memory_is_counted=False)) < len(counted)
