"""The contract: names and signatures that other programs are written against."""

import doctest
import inspect
import subprocess
import sys

import tracefit
from tests.support.paths import ROOT
from tests.tracefit.example_snapshot import encoded
from tracefit import shapes

CONFIG_ATTRIBUTES = (
    *("config_id", "name", "facts", "limits", "model", "gpu", "usable", "reasons", "verdict", "targets"),
    *("engines", "telemetry", "prefix_hits_hidden"),
)
FIELDS = {
    "Coefficient": "name unit value stderr status mean reason form_error",
    "Prediction": "us low high extrapolated usable",
    "Estimate": "us low high",
    "RequestEstimate": "concurrency running ttft itl e2e requests_per_s output_tokens_per_s prefill_bound "
    "extrapolated usable",
    "Plan": "concurrency limit at curve replicas",
    "Limits": "max_num_seqs max_num_batched_tokens kv_tokens",
    "Diff": "configs only_before only_after",
    "ConfigDiff": "before_id after_id moves step term added",
    "Move": "target feature unit before after standard_errors status_before status_after moved",
    "TypicalStep": "prefill_tokens requests decode_context_tokens before_us after_us",
    "Target": "name champion models interval shapes seen cells mean_us mean_factor step_ahead_us "
    "context_us_per_token level change outliers",
    "Model": "name coefficients rows mape median_ape covariance",
    "Interval": "pooled strata",
    "Shape": "factor rows usual",
    "Level": "factor last_row_unix_nano",
    "OutlierReplica": "engine ratio stderr term added siblings",
    "SpeedChange": "factor since_unix_nano term added within_s",
    "Problem": "text is_defect key",
    "Verdict": "usable reasons doubts quarantined error rows last_row_unix_nano last_heard_unix_nano replaced change "
    "outliers seen hidden",
    "Identity": "config_id facts last_seen_unix_nano replaced",
    "MeanWork": "prefill_tokens requests decode_context_tokens us",
}
CALLS = {
    tracefit.load: "source token timeout_s",
    tracefit.Snapshot.config: "self config_id model gpu",
    tracefit.Snapshot.diff: "self other",
    tracefit.Config.step_time: "self prefill_tokens requests decode_context_tokens",
    tracefit.Config.request: "self prompt_tokens output_tokens concurrency prefix_hit",
    tracefit.Config.plan: "self prompt_tokens output_tokens itl_ms ttft_ms rate prefix_hit safe",
    tracefit.Config.assuming: "self max_num_seqs max_num_batched_tokens kv_tokens",
    tracefit.Config.coefficients: "self target",
    tracefit.Config.now: "self at_unix_nano",
}


def test_every_public_name_is_known_here():
    others = {
        "Config",
        "Snapshot",
        "find_config",
        "load",
        "minute",
        "term_text",
        "distinctions",
    }
    errors = {"TracefitError", "BadInputError", "LoadError", "NoCoefficientsError", "NotFoundError"}
    assert set(tracefit.__all__) == FIELDS.keys() | others | errors
    assert list(tracefit.__all__) == sorted(tracefit.__all__)


def test_results_have_these_fields_in_this_order():
    for name, fields in FIELDS.items():
        assert getattr(tracefit, name)._fields == tuple(fields.split()), name


def test_calls_have_these_parameters():
    for call, names in CALLS.items():
        assert list(inspect.signature(call).parameters) == names.split(), call


def test_a_config_and_a_snapshot_have_these_attributes():
    snapshot = tracefit.load(encoded())
    config = snapshot.config()
    for name in CONFIG_ATTRIBUTES:
        assert hasattr(config, name), name
    for name in ["generation", "created_unix_nano", "tracefit_version", "configs", "data"]:
        assert hasattr(snapshot, name), name


def test_the_examples_in_the_documentation_run():
    for module in (tracefit, shapes):
        found = doctest.testmod(module, extraglobs={"EXAMPLE": encoded()}, optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
        assert found.attempted
        assert not found.failed


def test_it_runs_where_nothing_of_ours_and_no_library_is_installed(tmp_path):
    """As when it is copied into another program: no site-packages, only this one folder."""
    (tmp_path / "tracefit").symlink_to(ROOT / "tracefit")
    (tmp_path / "snapshot.json").write_bytes(encoded())
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import tracefit; "
        f"print(tracefit.load({str(tmp_path / 'snapshot.json')!r}).config().step_time(requests=8).us)"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert not done.stderr
    assert float(done.stdout) > 0
