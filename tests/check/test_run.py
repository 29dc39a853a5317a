"""The checks on sound models and on models with one planted fault each: in our own code, and through `--module`."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import planted
import pytest

from steelyard.check.report import NAMES, CheckReport, judge
from steelyard.check.request import CheckRequest, ModelSource
from steelyard.check.run import _raise_failures, run_checks
from steelyard.errors import PeerError, SteelyardError, UsageError
from steelyard.testing.pool import WorkerPool

USERS = Path(__file__).with_name("users_models.py")
NAMES_SET = frozenset(NAMES)


def module(function: str, **changes: object) -> CheckRequest:
    return CheckRequest(ModelSource("module", f"{USERS}:{function}"), **changes)  # type: ignore[arg-type]


def failed(report: CheckReport) -> set[str]:
    for result in report.results:
        within = math.isfinite(result.max_abs_diff) and result.max_abs_diff <= result.tolerance
        assert within or not result.passed, f"{result.name} passed with a difference beyond its tolerance"
    assert [result.name for result in report.results] == list(NAMES)
    return {result.name for result in report.results if not result.passed}


# --- what is sound ----------------------------------------------------------------------------------------------------


def test_our_decoder(pool: WorkerPool) -> None:
    stages: list[tuple[str, int, int]] = []
    report = run_checks(CheckRequest(), pool=pool, progress=lambda *stage: stages.append(stage))
    assert failed(report) == set()
    assert (report.documents, report.tokens) == (12, 329)
    assert stages == [
        (what, done, 5)
        for done, what in enumerate(
            ["documents one by one", "on 1 process", *(f"on {ranks} processes" for ranks in (2, 3, 4))]
        )
    ]


def test_our_decoder_in_fp64(pool: WorkerPool) -> None:
    report = run_checks(CheckRequest(dtype="float64", ranks=(2,)), pool=pool)
    assert failed(report) == set()
    assert all(result.max_abs_diff < 1e-13 for result in report.results[:5])


OTHER_FAMILIES = [
    pytest.param(name, marks=pytest.mark.nightly) for name in ("mistral", "mixtral", "qwen2", "qwen3", "gemma3")
]


@pytest.mark.parametrize("name", ["llama", "gemma2", *OTHER_FAMILIES])
def test_families(pool: WorkerPool, name: str) -> None:
    assert failed(run_checks(CheckRequest(ModelSource("family", name), ranks=(1, 3)), pool=pool)) == set()


@pytest.mark.parametrize("way", ["checkpointing", "ping_pong"])
def test_a_transformers_model_in_other_ways(pool: WorkerPool, way: str) -> None:
    request = CheckRequest(ModelSource("family", "llama"), ranks=(1, 3), **{way: True})  # type: ignore[arg-type]
    assert failed(run_checks(request, pool=pool)) == set()
    with pytest.raises(UsageError, match=r"only for Transformers models, and .*own\(\) builds another one"):
        run_checks(module("own", ranks=(1,), **{way: True}), pool=pool)


def test_dropout_is_not_turned_on_by_checkpointing(pool: WorkerPool) -> None:
    assert failed(run_checks(module("hf_opt", ranks=(1, 2), checkpointing=True), pool=pool)) == set()


SOUND = ["own", "own_with_everything", "own_like_ddp", "own_windowed", "hf", "hf_flattened", "hf_padded"]


@pytest.mark.parametrize("function", SOUND)
def test_sound_models_of_users(pool: WorkerPool, function: str) -> None:
    assert failed(run_checks(module(function, ranks=(1, 3)), pool=pool)) == set()


def test_long_documents_in_which_a_token_weighs_little(pool: WorkerPool) -> None:
    docs = tuple(tuple((7 * d + i * i) % 50 for i in range(128)) for d in range(3))
    assert failed(run_checks(module("own", documents=docs, ranks=(2,)), pool=pool)) == set()


def test_data_of_users(pool: WorkerPool) -> None:
    docs = tuple(tuple((7 * d + i * i) % 50 for i in range(length)) for d, length in enumerate([9, 30, 2, 17, 5]))
    report = run_checks(module("own", documents=docs), pool=pool)
    assert failed(report) == set()
    assert (report.documents, report.tokens) == (5, 63)


# --- what is not ------------------------------------------------------------------------------------------------------

PLANTED = {
    "leak": {"rank_count_invariance", "document_isolation"},
    "mean of means": {"rank_count_invariance", "token_weighted_loss"},
    "rolled labels": {"rank_count_invariance", "label_shift"},
    "dropped tail": {"rank_count_invariance", "label_shift"},
    "wrong rows sent": {"rank_count_invariance", "token_weighted_loss"},
}


@pytest.mark.parametrize("fault", PLANTED)
def test_faults_planted_in_our_own_code(pool: WorkerPool, fault: str) -> None:
    request = CheckRequest(ranks=(1, 2))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "gradients.pt")
        # The reference of a leak is computed one document at a time, where nothing can leak.
        outcomes = pool.run_all(planted.reference, 1, request, path, fault)
        _raise_failures(outcomes, 1, debug=True)
        by_ranks = {n: pool.run_all(planted.rank, n, request, path, fault) for n in request.ranks}
        for ranks, measures in by_ranks.items():
            _raise_failures(measures, ranks, debug=True)
    report = judge(request, outcomes[0], by_ranks)
    assert failed(report) == PLANTED[fault]


THROUGH_MODULE = {
    "own_leaky": {"rank_count_invariance", "document_isolation"},
    "hf_leaky": {"rank_count_invariance", "document_isolation", "balance"},
    "own_mean_of_means": {"rank_count_invariance", "token_weighted_loss"},
    "hf_mean_of_means": {"rank_count_invariance", "token_weighted_loss"},
    "own_rolled": {"rank_count_invariance", "label_shift"},
    "hf_rolled": {"rank_count_invariance", "label_shift"},
    "hf_shifted_twice": {"rank_count_invariance", "label_shift"},
    "own_drops_tail": {"rank_count_invariance", "label_shift"},
    "hf_drops_tail": {"rank_count_invariance"},
    "own_loses_gradients": {"rank_count_invariance"},
    "own_one_wrong_gradient": {"rank_count_invariance"},
    "own_local": {"balance"},
    "own_blind": {"document_isolation"},
    "own_half_blind": {"document_isolation"},
    "own_blind_row": {"document_isolation"},
    "own_pooled": {"causal"},
    "own_one_ahead": {"causal"},
    "own_broken": NAMES_SET - {"balance"},
}


@pytest.mark.parametrize("function", THROUGH_MODULE)
def test_faults_planted_through_module(pool: WorkerPool, function: str) -> None:
    report = run_checks(module(function, ranks=(1, 3)), pool=pool)
    assert failed(report) == THROUGH_MODULE[function], [(r.name, r.max_abs_diff, r.tolerance) for r in report.results]


def test_findings_say_what_was_seen(pool: WorkerPool) -> None:
    report = run_checks(module("own_rolled", ranks=(2,)), pool=pool)
    [shift] = [result for result in report.results if result.name == "label_shift"]
    assert f"documents of {shift.finding.partition(':')[0]}" == shift.where
    assert ": token 6, its last, of document 0 in the batch has label " in shift.finding
    assert shift.finding.endswith(", expected -100")
    report = run_checks(module("own_drops_tail", ranks=(2,)), pool=pool)
    assert report.results[0].finding == "with 1 process, the batch of rank 0 lacks 1 token of its documents"
    assert report.results[0].advice.startswith("Mend this first: the collator")
    report = run_checks(module("own_half_blind", ranks=(2,)), pool=pool)
    assert report.results[1].finding.startswith("the output of token 1 of document 2, which has 13 tokens, depends on")
    report = run_checks(module("own_blind_row", ranks=(2,)), pool=pool)
    assert report.results[1].finding.startswith("the output of token 16 of document 6, which has 96 tokens, depends on")
    report = run_checks(module("own_local", ranks=(2,)), pool=pool)
    assert report.results[5].finding.startswith("attention did not pass through Steelyard")


# --- what a user may get wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such", "'no_such' is nothing in "),
        ("VOCAB", "'VOCAB' is a int in "),
        ("returns_a_number", "returned int, expected a torch.nn.Module, or a dictionary with one as 'model'"),
        (
            "unknown_key",
            "returned the unknown key 'colate'; known: model, collate, loss, logits, gradients, vocab_size",
        ),
        ("needs_two", "it needs balancer, size; expected no parameter (a Transformers model), or one (the balancer)"),
        ("raises", "raised RuntimeError: no such checkpoint; --debug shows where"),
        ("loss_is_a_number", "returned float, expected a scalar with a gradient"),
        ("has_dropout", "attach: LlamaForCausalLM uses attention dropout (attention_dropout=0.1)"),
        ("refuses_halves", "raised RuntimeError: run in halves; --debug shows where"),
        ("unseeded", "must make the same ones each time; seed its random numbers"),
    ],
)
def test_mistakes_are_one_line(pool: WorkerPool, function: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        run_checks(module(function, ranks=(1,), ping_pong=function == "refuses_halves"), pool=pool)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_context_that_is_short(pool: WorkerPool) -> None:
    assert failed(run_checks(module("short_context", ranks=(2,)), pool=pool)) == set()  # random documents are cut
    with pytest.raises(
        UsageError, match=r"a document of 33 tokens is longer than the context of .* 32 tokens; give --max"
    ):
        run_checks(module("short_context", documents=((1, 2), (3,) * 33), ranks=(1,)), pool=pool)


def test_a_token_that_the_model_does_not_know(pool: WorkerPool) -> None:
    docs = ((3, 50, 2), (1, 2, 3))
    with pytest.raises(
        UsageError, match=r"the data hold token id 50, .* only knows ids below 50; give the model's own"
    ):
        run_checks(module("own", documents=docs, ranks=(1,)), pool=pool)


def test_a_failure_on_one_rank_of_several_names_it() -> None:
    """With workers of its own: one that failed leaves the others waiting, and they are given up."""
    with WorkerPool(2) as own_pool, pytest.raises(SteelyardError) as error:
        run_checks(module("fails_on_two", ranks=(2,)), pool=own_pool)
    assert isinstance(error.value, (UsageError, PeerError))
    assert str(error.value).startswith("rank 1 of 2: loss of ")
    assert "raised RuntimeError: only here; --debug shows where" in str(error.value)


def test_a_killed_process_is_named_and_no_check_has_failed() -> None:
    with WorkerPool(2) as own_pool, pytest.raises(SteelyardError) as error:
        run_checks(module("killed_on_two", ranks=(2,)), pool=own_pool)
    assert error.value.exit_code == 2
    assert "on rank 1 of 2: ProcessDied: the worker process ended, killed by signal 9" in str(error.value)


def test_debug_prints_where_it_came_from(pool: WorkerPool, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError):
        run_checks(module("raises", ranks=(1,)), pool=pool, debug=True)
    assert "users_models.py" in capsys.readouterr().err
