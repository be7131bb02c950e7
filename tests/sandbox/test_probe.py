from __future__ import annotations

import pytest

from etude.sandbox.probe import probe
from etude.sandbox.recipe import SandboxRecipe


def test_every_finding_of_this_machine_is_named_and_a_real_sandbox_proves_it() -> None:
    findings = {finding.name: finding for finding in probe()}
    assert list(findings) == ["kernel", "bubblewrap", "system-call filter", "python inside", "limits", "sandbox"]
    assert all(finding.ok and finding.cause and not finding.fix for finding in findings.values()), findings
    assert "cgroups" in findings["limits"].cause or "rlimits" in findings["limits"].cause


def test_what_is_missing_comes_with_its_cause_and_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    findings = {finding.name: finding for finding in probe(SandboxRecipe(python="/no/python"))}
    for name in ("bubblewrap", "python inside", "sandbox"):
        assert not findings[name].ok
        assert findings[name].cause
        assert findings[name].fix
