"""Predictions against published measurements: errors per source, fitted and held out apart, exclusions with reasons."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from steelyard.errors import UsageError
from steelyard.simulate.documents import uniform_documents
from steelyard.simulate.microbenchmarks import KERNEL_SOURCES, measurements
from steelyard.simulate.published import Case, Role, cases_of
from steelyard.simulate.step import simulate_step
from steelyard.simulate.workloads import WorkloadCache

SCHEMA = "validation-table/1"


@dataclass(frozen=True)
class Comparison:
    """One row that was compared: predicted and measured, in seconds or bytes."""

    source: str
    table: str
    label: str
    role: Role
    quantity: str
    predicted: float
    measured: float
    group: str = ""

    @property
    def error(self) -> float:
        """Relative; positive: predicted too long or too large."""
        return self.predicted / self.measured - 1


@dataclass
class SourceReport:
    """One source in one role."""

    name: str
    role: Role
    comparisons: list[Comparison] = field(default_factory=list)
    excluded: dict[str, int] = field(default_factory=dict)
    out_of_memory: dict[str, int] = field(default_factory=dict)

    def of(self, quantity: str) -> list[Comparison]:
        return [c for c in self.comparisons if c.quantity == quantity]

    def as_json(self) -> dict[str, Any]:
        """The contract of `steelyard validate --json`, with memory and ranking beside it."""
        times, memory = self.of("time"), self.of("memory")
        values: dict[str, Any] = {
            "name": self.name,
            "role": self.role,
            "points": len(times),
            "excluded": [{"reason": r, "points": n} for r, n in sorted(self.excluded.items())],
            **_errors(times, ""),
        }
        values["memory_points"] = len(memory)
        values |= _errors(memory, "memory_")
        if self.out_of_memory:
            values["out_of_memory"] = dict(self.out_of_memory)
        tau = ranking(times)
        if tau is not None:
            values["kendall_tau"] = tau
        return values


def _errors(comparisons: Sequence[Comparison], prefix: str) -> dict[str, float | None]:
    if not comparisons:
        return {f"{prefix}{k}_pct_error": None for k in ("mean_abs", "bias", "worst")}
    errors = np.array([c.error for c in comparisons])
    return {
        f"{prefix}mean_abs_pct_error": float(100 * np.abs(errors).mean()),
        f"{prefix}bias_pct_error": float(100 * errors.mean()),
        f"{prefix}worst_pct_error": float(100 * errors[np.abs(errors).argmax()]),
    }


def ranking(comparisons: Iterable[Comparison]) -> float | None:
    """Kendall's τ between predicted and measured order, mean over groups of at least three, weighted by pairs."""
    groups: dict[str, list[Comparison]] = {}
    for c in comparisons:
        if c.group:
            groups.setdefault(c.group, []).append(c)
    concordant = total = 0
    for members in groups.values():
        if len(members) < 3:
            continue
        predicted = np.array([c.predicted for c in members])
        measured = np.array([c.measured for c in members])
        upper = np.triu_indices(len(members), 1)
        signs = np.sign(predicted[:, None] - predicted)[upper] * np.sign(measured[:, None] - measured)[upper]
        concordant += int(signs.sum())
        total += len(signs)
    return concordant / total if total else None


def ranking_with_errors(
    comparisons: Sequence[Comparison], mean_error: float, *, draws: int = 50, seed: int = 0
) -> tuple[float, float]:
    """The τ of a predictor whose errors are random: mean and standard deviation over `draws`.

    It predicts what was measured times the exponential of a normal error, each row's independent of all others', of
    which the mean absolute value is `mean_error`. Where measured times lie close together, small errors cost much τ.

    Raises:
        UsageError: no group has three members.
    """
    random = np.random.default_rng(seed)
    spread = mean_error * float(np.sqrt(np.pi / 2))  # of a normal distribution with that mean absolute value
    found = []
    for _ in range(draws):
        factors = np.exp(random.normal(0.0, spread, len(comparisons)))
        drawn = [replace(c, predicted=c.measured * float(f)) for c, f in zip(comparisons, factors, strict=True)]
        tau = ranking(drawn)
        if tau is None:
            raise UsageError("ranking: no group of three comparisons or more")
        found.append(tau)
    return float(np.mean(found)), float(np.std(found))


def load_tables(folder: Path | None = None) -> dict[str, Mapping[str, Any]]:
    """Sources by name: those that are shipped, or all of a folder.

    Raises:
        UsageError: no such folder, or no table in it.
    """
    if folder is None:
        root = resources.files("steelyard.simulate").joinpath("tables")
        texts = {p.name: p.read_text("utf-8") for p in root.iterdir() if p.name.endswith(".json")}
    else:
        if not folder.is_dir():
            raise UsageError(f"--data {folder}: there is no such folder; expected one with tables of the form {SCHEMA}")
        texts = {p.name: p.read_text("utf-8") for p in sorted(folder.glob("*.json"))}
    found: dict[str, Mapping[str, Any]] = {}
    for name, text in sorted(texts.items()):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--data: {name} is no JSON: {error}") from error
        if not isinstance(content, dict) or content.get("schema") != SCHEMA or "tables" not in content:
            schema = content.get("schema") if isinstance(content, dict) else None
            raise UsageError(f"--data: {name} has schema {schema!r}, expected {SCHEMA!r} with `tables`")
        found[name.removesuffix(".json")] = content
    if not found:
        raise UsageError(f"--data {folder}: no *.json in it; expected tables of the form {SCHEMA}")
    return found


def validate(tables: Mapping[str, Mapping[str, Any]]) -> list[SourceReport]:
    """Compare every row of every source with a prediction."""
    reports: list[SourceReport] = []
    for name, content in tables.items():
        by_role: dict[Role, SourceReport] = {}

        def report(role: Role, name: str = name, by_role: dict[Role, SourceReport] = by_role) -> SourceReport:
            return by_role.setdefault(role, SourceReport(name, role))

        if name in KERNEL_SOURCES:
            for m in measurements(name, content):
                found = report(m.role)
                if m.excluded:
                    found.excluded[m.excluded] = found.excluded.get(m.excluded, 0) + 1
                else:
                    found.comparisons.append(Comparison(name, "", m.label, m.role, "time", m.predicted_s, m.measured_s))
        else:
            _compare(cases_of(name, content), report)
        reports += [by_role[role] for role in ("fitted", "held_out") if role in by_role]
    return reports


def _compare(cases: Sequence[Case], report: Any) -> None:
    caches: dict[int, WorkloadCache] = {}
    for case in cases:
        found: SourceReport = report(case.role)
        if case.excluded or case.scenario is None:
            found.excluded[case.excluded] = found.excluded.get(case.excluded, 0) + 1
            continue
        length = case.document_tokens
        cache = caches.setdefault(length, WorkloadCache(uniform_documents(length)))
        estimate = simulate_step(case.scenario, cache, batches=1)
        if case.out_of_memory:
            verdict = estimate.memory.verdict
            found.out_of_memory[verdict] = found.out_of_memory.get(verdict, 0) + 1
            continue
        if case.time_excluded:
            found.excluded[case.time_excluded] = found.excluded.get(case.time_excluded, 0) + 1
        where = (case.source, case.table, case.label, case.role)
        if case.step_time_s:
            found.comparisons.append(Comparison(*where, "time", estimate.step_time_s, case.step_time_s, case.group))
        if case.memory_bytes:
            memory = estimate.memory
            predicted = memory.live if case.memory_kind == "allocated" else memory.held
            found.comparisons.append(Comparison(*where, "memory", predicted, case.memory_bytes))
        if not case.step_time_s and not case.memory_bytes and not case.time_excluded:
            reason = "neither a comparable time nor memory in the row"
            found.excluded[reason] = found.excluded.get(reason, 0) + 1
