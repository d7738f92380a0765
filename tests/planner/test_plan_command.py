"""`weightsync plan`, run in this process."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from weightsync.cli.application import app

KEYS = {"seconds", "peak_rss_bytes", "moves", "ranges", "bytes_needed", "bytes_moved", "egress_max_over_mean",
        "ranges_per_pair_mean", "bytes_per_pair_median", "moved_over_needed", "parameters"}  # fmt: skip


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_plan_is_shown_and_written(tmp_path):
    target = tmp_path / "plan.json"
    degrees = ["--trainer", "fsdp=4", "--servers", "tp=2,replicas=2"]
    code, out, _ = run("--model", "llama-3-8b", *degrees, "--json", str(target))
    assert code == 0 and "4 trainer ranks to 4 server ranks" in out and "egress" in out
    document = json.loads(target.read_text())
    assert document.keys() >= KEYS
    assert document["bytes_moved"] == document["bytes_needed"] >= 2 * 2 * 8.03e9
    assert document["ranges"] == document["pairs"] == 16 and document["egress_max_over_mean"] < 1.001


def test_any_configuration_and_placement_can_be_planned(tmp_path):
    config = {"model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
              "vocab_size": 100, "num_hidden_layers": 2, "moe_intermediate_size": 16, "num_experts": 4}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "placement.json").write_text("[[0, 3, 3], [1, 2, 0]]")
    code, out, _ = run("--config", str(tmp_path / "config.json"), "--servers", "ep=2",
                       "--placement", str(tmp_path / "placement.json"), "--json", "-")  # fmt: skip
    assert code == 0 and json.loads(out)["target_ranks"] == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "gpt-9"], "no model 'gpt-9'; there are llama-3-8b"),
        ([], "give one of --model and --config; models are llama-3-8b"),
        (["--model", "kimi-k2", "--trainer", "fdsp=2"], "--trainer: no key 'fdsp'; there are tp, pp, ep"),
        (["--model", "kimi-k2", "--servers", "tp=two"], "--servers: tp='two', expected a number"),
        (["--model", "kimi-k2", "--servers", "tp=0"], "--servers: tp='0', expected a number of at least 1"),
        (["--model", "kimi-k2", "--servers", "tp=2,tp=4"], "--servers: tp is given twice"),
        (["--model", "llama-3-8b", "--servers", "tp=7"], "32 heads can't be divided among 7"),
        (["--model", "kimi-k2", "--placement", "/nowhere"], "--placement /nowhere"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_line(arguments, text):
    code, _, err = run(*arguments)
    assert code == 1 and err.startswith("error: ") and text in err and err.count("\n") == 1
