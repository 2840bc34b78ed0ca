"""Bad scenarios, one fault each: the message names the line, the key, and what would be right."""

import time

import pytest

from kvasir_core.errors import ScenarioError
from kvasir_scenario.load import load_text

BASE = """\
model: {layers: 8, context: 512}
devices: {big: {preset: a100-80g}}
ring:
  stages:
    - {layers: 4, pass_s: 1.0}
    - {layers: [4, 8]}
  row_width: 64
  kv_tokens: 4096
costs: {kind: fixed}
policy: {packer: cohort}
workload:
  kind: trace
  requests:
    - [0, 1, 10]
slo: {ttft_s: 1.0}
faults:
  - {kind: stage_lost, stage: 0, at_s: 5, for_s: 2}
run: {seed: 1}
"""
SYNTHETIC = (
    "workload: {kind: poisson, rate_per_s: 1, requests: 5, prompt_tokens: 9, output_tokens: 9}"
)
TRACE = "workload:\n  kind: trace\n  requests:\n    - [0, 1, 10]"


def workload(text: str) -> tuple[str, str]:
    return TRACE, f"workload: {text}"


def poisson(changes: str) -> tuple[str, str]:
    kept = {"rate_per_s": "1", "requests": "5", "prompt_tokens": "9", "output_tokens": "9"}
    body = {**kept, changes.split(":", maxsplit=1)[0]: changes.partition(":")[2].strip()}
    return workload("{kind: poisson, " + ", ".join(f"{k}: {v}" for k, v in body.items()) + "}")


# What is replaced, by what, the line, the key, and a part of the rest of the message.
Case = tuple[tuple[str, str], int, str, str]
CASES: list[Case] = [
    # Shape of the file.
    (("run: {seed: 1}", "run: {seed: 1}\nrun: {seed: 2}"), 19, "run", "stands already in line 18"),
    (("{seed: 1}", "{seed: 1, seed: 2}"), 18, "run.seed", "stands already in line 18"),
    (("slo:", "slow:"), 15, "slow", "unknown key; did you mean slo?"),
    (("  row_width: 64", "  row_widht: 64"), 7, "ring.row_widht", "did you mean row_width?"),
    (("layers: 4, pass_s", "layers: 4, pass_ms"), 5, "ring.stages.0.pass_ms", "mean pass_s?"),
    (("{seed: 1}", "{seed: 1}\nwindow: 2"), 19, "window", "`ring` has such a key"),
    (("{seed: 1}", "{seed: 1, window: 2}"), 18, "run.window", "`ring` has such a key"),
    (("{seed: 1}", "{seed: 1}\nring.window: 2"), 19, "ring.window", "here maps are nested"),
    (("model: {layers: 8, context: 512}", "model: 8"), 1, "model", "found 8; it must be a map"),
    (("run: {seed: 1}", "run: [1]"), 18, "run", "found a list of 1; it must be a map"),
    (("{seed: 1}", "{seed: &a 1}"), 18, "run.seed", "anchors and aliases"),
    (("{seed: 1}", "{seed: !!python/object:os.system 1}"), 18, "run.seed", "the tag"),
    (("{seed: 1}", "{seed: !!int '1'}"), 18, "run.seed", "the tag"),
    (("{seed: 1}", "{[1]: 1}"), 18, "run", "a key must be a word"),
    (("{seed: 1}", "{seed: 1}\n--- {}"), 19, "(top level)", "a second document begins"),
    (("model: {layers: 8, context: 512}\n", ""), 1, "model", "missing"),
    # Numbers.
    (("row_width: 64", "row_width: -64"), 7, "ring.row_width", "found -64; it must be at least 1"),
    (("row_width: 64", "row_width: 0"), 7, "ring.row_width", "found 0; it must be at least 1"),
    (("row_width: 64", "row_width: true"), 7, "ring.row_width", "found true; it must be a whole"),
    (("row_width: 64", "row_width: '64'"), 7, "ring.row_width", 'found "64"; it must be a whole'),
    (("row_width: 64", "row_width: 64.5"), 7, "ring.row_width", "found 64.5; it must be a whole"),
    (("row_width: 64", "row_width: 010"), 7, "ring.row_width", "leave out the leading zero"),
    (("row_width: 64", "row_width: 1e30"), 7, "ring.row_width", "it must be a whole number"),
    (("row_width: 64", "row_width: 99999999"), 7, "ring.row_width", "at most 1048576"),
    (("row_width: 64", "row_width: null"), 7, "ring.row_width", "found nothing (null)"),
    (("row_width: 64", "row_width: [64]"), 7, "ring.row_width", "found a list of 1"),
    (("pass_s: 1.0", "pass_s: .nan"), 5, "ring.stages.0.pass_s", "found .nan; a number must be"),
    (("pass_s: 1.0", "pass_s: -.inf"), 5, "ring.stages.0.pass_s", "found -.inf; a number must be"),
    (("pass_s: 1.0", "pass_s: 1e999"), 5, "ring.stages.0.pass_s", "found 1e999"),
    (("pass_s: 1.0", "pass_s: -1"), 5, "ring.stages.0.pass_s", "found -1; it must be at least 0"),
    (("pass_s: 1.0", "pass_s: 10ms"), 5, "ring.stages.0.pass_s", "write the number alone"),
    (("pass_s: 1.0", "pass_s: 1:30"), 5, "ring.stages.0.pass_s", "write seconds"),
    (("pass_s: 1.0", "pass_s: 0"), 5, "ring.stages.0.pass_s", "takes no time at all"),
    (("pass_s: 1.0", "pass_s: 1e12"), 5, "ring.stages.0.pass_s", "at most 1e+06"),
    (("ttft_s: 1.0", "ttft_s: 0"), 15, "slo.ttft_s", "found 0; it must be more than 0"),
    (("{seed: 1}", f"{{seed: {2**63}}}"), 18, "run.seed", "it must be less than"),
    (("{seed: 1}", "{seed: " + "9" * 5000 + "}"), 18, "run.seed", "a number of 5000 characters"),
    # Model and devices.
    (("layers: 8,", "layers: 9,"), 4, "ring.stages", "hold 8 layers, but model.layers is 9"),
    (("layers: 8,", "layers: 0,"), 1, "model.layers", "found 0; it must be at least 1"),
    (("layers: 8,", "preset: llama-3-8,"), 1, "model.preset", "did you mean llama-3-8b?"),
    (("layers: 8,", "layers: 8, dtype: bf16,"), 1, "model.dtype", "did you mean bfloat16?"),
    (("layers: 8,", "layers: 8, heads: 9, kv_heads: 2,"), 1, "model.kv_heads", "heads (9)"),
    (("layers: 8,", "layers: 8, experts: 8,"), 1, "model.experts_used", "missing"),
    (
        ("layers: 8,", "layers: 8, experts: 8, experts_used: 9,"),
        1, "model.experts_used", "at most experts (8)",
    ),
    (("{preset: a100-80g}", "{}"), 2, "devices.big.flops", "missing; a device needs a preset"),
    (("{preset: a100-80g}", "{flops: -1}"), 2, "devices.big.flops", "it must be at least 1"),
    (("{big: {preset: a100-80g}}", "{'../x': {preset: a}}"), 2, "devices.../x", "match pattern"),
    # Ring.
    (
        ("    - {layers: [4, 8]}\n", ""),
        4, "ring.stages", "found a list of 1; a ring has at least 2 stages: head and tail are",
    ),
    (("[4, 8]", "[3, 8]"), 6, "ring.stages.1.layers", "start at 4, where the stage before it"),
    (("[4, 8]", "[5, 8]"), 6, "ring.stages.1.layers", "found [5, 8); it must start at 4"),
    (("[4, 8]", "[8, 4]"), 6, "ring.stages.1.layers", "found [8, 4); it must hold at least one"),
    (("[4, 8]", "[4, 8, 9]"), 6, "ring.stages.1.layers", "found a list of 3; it must have at most"),
    (("[4, 8]", "[4]"), 6, "ring.stages.1.layers", "found a list of 1; it must have more"),
    (("[4, 8]", "four"), 6, "ring.stages.1.layers", "a number of layers, [start, stop), or auto"),
    (("[4, 8]", "[4, 8], device: bug"), 6, "ring.stages.1.device", "did you mean big?"),
    (("kv_tokens: 4096", "kv_tokens: [4096]"), 8, "ring.kv_tokens", "1 entries; there are 2"),
    (("kv_tokens: 4096", "kv_tokens: 15"), 8, "ring.kv_tokens", "one block of kv_block (16)"),
    (("kv_tokens: 4096", "kv_tokens: lots"), 8, "ring.kv_tokens", "or unbounded"),
    (("kv_tokens: 4096", "credits: 0"), 8, "ring.credits", "found 0; it must be at least 1"),
    (("kv_tokens: 4096", "credits: none"), 8, "ring.credits", "or unbounded"),
    (("kv_tokens: 4096", "window: 0"), 8, "ring.window", "found 0; it must be at least 1"),
    (("kv_tokens: 4096", "window: 9\n  window_max: 4"), 8, "ring.window", "at most window_max (4)"),
    (("kv_tokens: 4096", "links: [{}, {}]"), 8, "ring.links", "2 stages have 1 hops"),
    (("kv_tokens: 4096", "link: 0.04"), 8, "ring.link", "found 0.04; it must be a map"),
    (
        ("kv_tokens: 4096", "link: {bandwidth_bytes_per_s: 0}"),
        8, "ring.link.bandwidth_bytes_per_s", "found 0; it must be at least 1",
    ),
    (
        ("kv_tokens: 4096", "link: {bandwidth_bytes_per_s: 1e9}"),
        1, "model.hidden", "missing; links with a bandwidth",
    ),
    (
        ("kv_tokens: 4096", "link: {occupies_sender: yes}"),
        8, "ring.link.occupies_sender", "it must be true or false (yes, no, on and off are text",
    ),
    # Costs and policy.
    (("{kind: fixed}", "{kind: fixd}"), 9, "costs.kind", 'found "fixd"; did you mean fixed?'),
    (("{kind: fixed}", "{}"), 9, "costs.kind", "missing; say which kind"),
    (("{kind: fixed}", "{kind: table}"), 9, "costs.file", "missing"),
    (("{kind: fixed}", "{kind: table, file: ''}"), 9, "costs.file", "at least 1 character"),
    (
        ("{kind: fixed}", "{kind: table, file: a.npz}"),
        5, "ring.stages.0.pass_s", "only costs of kind fixed use it, and these are table",
    ),
    (("{kind: fixed}", "{kind: fixed, file: a}"), 9, "costs.file", "unknown key"),
    (("{packer: cohort}", "{packer: chohort}"), 10, "policy.packer", "did you mean cohort?"),
    (("{packer: cohort}", "{chunked_prefill: false}"), 10, "policy.chunked_prefill", "(64) is less"),
    (("{packer: cohort}", "{prefill_rows_max: 0}"), 10, "policy.prefill_rows_max", "at least 1"),
    # Workload.
    (("[0, 1, 10]", "[0, 0, 10]"), 14, "workload.requests.0.1", "found 0; it must be at least 1"),
    (("[0, 1, 10]", "[-1, 1, 10]"), 14, "workload.requests.0.0", "found -1; it must be at least"),
    (("[0, 1, 10]", "[0, 1]"), 14, "workload.requests.0", "found a list of 2; it must have more"),
    (("[0, 1, 10]", "[0, 1, x]"), 14, "workload.requests.0.2", 'found "x"; it must be a whole'),
    (("\n    - [0, 1, 10]", " []"), 13, "workload.requests", "it must have at least 1 entries"),
    (workload("{kind: trace}"), 11, "workload", "found neither of requests and path"),
    (workload("{kind: trace, path: a.csv}"), 11, "workload.format", "missing; it must be azure"),
    (
        workload("{kind: trace, path: a.csv, format: azure, columns: {}}"),
        11, "workload.columns", "format azure has fixed columns",
    ),
    (
        workload("{kind: trace, path: a.csv, format: csv, time_unit: m}"),
        11, "workload.time_unit", 'found "m"; did you mean ms?',
    ),
    (
        workload("{kind: trace, path: a.csv, format: csv, start_s: 9, stop_s: 9}"),
        11, "workload.stop_s", "it must be above start_s (9)",
    ),
    (
        workload("{kind: trace, path: a.csv, format: csv, time_scale: 2, rate_scale: 2}"),
        11, "workload.rate_scale", "time_scale is set too",
    ),
    (
        workload('{kind: trace, path: "a\\0b", format: csv}'),
        11, "workload.path", "match pattern",
    ),
    (workload("{kind: posson}"), 11, "workload.kind", "did you mean poisson?"),
    (workload("{kind: poisson}"), 11, "workload.rate_per_s", "missing"),
    (poisson("rate_per_s: 0"), 11, "workload.rate_per_s", "found 0; it must be more than 0"),
    (poisson("rate_per_s: fast"), 11, "workload.rate_per_s", "it must be requests per second"),
    (
        poisson("rate_per_s: {phases: [{rate_per_s: 0, for_s: 1}]}"),
        11, "workload.rate_per_s.phases", "every rate is 0",
    ),
    (
        poisson("rate_per_s: {repeat: true, phases: [{rate_per_s: 1, for_s: 0}]}"),
        11, "workload.rate_per_s.phases", "every phase lasts 0 s",
    ),
    (poisson("duration_s: 5"), 11, "workload", "found both of requests and duration_s"),
    (poisson("prompt_tokens: 0"), 11, "workload.prompt_tokens", "found 0; it must be at least 1"),
    (
        poisson("prompt_tokens: {}"),
        11, "workload.prompt_tokens", "found none; give exactly one of percentiles",
    ),
    (
        poisson("prompt_tokens: {uniform: [1, 2], empirical: [1]}"),
        11, "workload.prompt_tokens", "found empirical and uniform; give exactly one",
    ),
    (
        poisson("prompt_tokens: {uniform: [2, 1]}"),
        11, "workload.prompt_tokens.uniform", "the least stands first",
    ),
    (
        poisson("prompt_tokens: {percentiles: {50: 9, 90: 8}}"),
        11, "workload.prompt_tokens.percentiles", "they must not fall",
    ),
    (
        poisson("prompt_tokens: {percentiles: {101: 9}}"),
        11, "workload.prompt_tokens.percentiles.101", "from 0 to 100",
    ),
    (
        poisson("prompt_tokens: {percentiles: {50: 1, 5e1: 1}}"),
        11, "workload.prompt_tokens.percentiles.5e1", "stands here twice",
    ),
    (
        poisson("prompt_tokens: {percentiles: {}}"),
        11, "workload.prompt_tokens.percentiles", "found none",
    ),
    (
        poisson("prompt_tokens: {lognormal: {median: 9, p90: 8}}"),
        11, "workload.prompt_tokens.lognormal.p90", "at least the median",
    ),
    (
        poisson("prompt_tokens: {uniform: [1, 9], min: 3, max: 2}"),
        11, "workload.prompt_tokens.min", "at most max (2)",
    ),
    (
        workload("{kind: closed, users: 3, prompt_tokens: 9, output_tokens: 9}"),
        15, "run.horizon_s", "closed-loop users never stop",
    ),
    (
        workload("{kind: closed, users: 0, requests: 3, prompt_tokens: 9, output_tokens: 9}"),
        11, "workload.users", "found 0; it must be at least 1",
    ),
    # Faults, run, the rest.
    (("stage: 0,", "stage: 2,"), 17, "faults.0.stage", "with 2 stages it must be from 0 to 1"),
    (("stage: 0,", "stage: all,"), 17, "faults.0.stage", "an index from 0, or any"),
    (("at_s: 5,", ""), 17, "faults.0", "found neither of at_s and rate_per_h"),
    (("at_s: 5,", "at_s: 5, rate_per_h: 1,"), 17, "faults.0", "found both of at_s and rate_per_h"),
    (("stage_lost", "stage_dead"), 17, "faults.0.kind", "Known here: stage_lost"),
    (("for_s: 2", "for_s: -2"), 17, "faults.0.for_s", "found -2; it must be at least 0"),
    (
        ("kind: stage_lost, stage: 0,", "kind: hub_lost,"),
        17, "faults.0.kind", "found hub_lost; there are no `experts`",
    ),
    (
        ("kind: stage_lost, stage: 0,", "kind: link_slow, hop: 0,"),
        17, "faults.0.factor", "neither factor nor add_s changes anything",
    ),
    (("{seed: 1}", "{warmup_s: 9, horizon_s: 9}"), 18, "run.warmup_s", "less than horizon_s (9)"),
    (("{seed: 1}", "{seed: 1}\nname: ../up"), 19, "name", "match pattern"),
    (("{seed: 1}", "{seed: 1}\nname: no"), 0, "", ""),
    (("{seed: 1}", "{seed: 1}\nruntime: {device: gpu}"), 19, "runtime.device", "match pattern"),
    (("{seed: 1}", "{seed: 1}\nwhat_if: {a: {x.y: 1}}"), 19, "what_if.a", "x: unknown key"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "line", "key", "rest"), CASES, ids=[f"{case[2]}-{i}" for i, case in enumerate(CASES)]
)
def test_a_fault_is_named_by_line_key_and_rule(
    change: tuple[str, str], line: int, key: str, rest: str
) -> None:
    old, new = change
    assert BASE.count(old) == 1, "the case must change exactly one place"
    text = BASE.replace(old, new)
    if not line:
        load_text(text)
        return
    started = time.process_time()
    with pytest.raises(ScenarioError) as caught:
        load_text(text, label="s.yaml")
    assert time.process_time() - started < 1
    message = str(caught.value)
    where = [part for part in message.splitlines() if part.startswith(f"s.yaml:{line}: {key}: ")]
    assert where, message
    assert rest in where[0]


def test_the_cases_change_a_valid_scenario() -> None:
    load_text(BASE)
    load_text(BASE.replace(TRACE, SYNTHETIC))


def test_several_faults_are_told_at_once_but_not_without_end() -> None:
    requests = ", ".join("[-1, 0, 0]" for _ in range(50))
    with pytest.raises(ScenarioError) as caught:
        load_text(BASE.replace("\n    - [0, 1, 10]", f" [{requests}]"), label="s.yaml")
    lines = str(caught.value).splitlines()
    assert len(lines) == 9
    assert lines[-1] == "s.yaml: and 92 more"


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(ScenarioError) as caught:
        load_text(BASE.replace("cohort", "x" * 10_000), label="s.yaml")
    assert len(str(caught.value)) < 500
