import pytest
import torch
from adapter_models import CausalLM

from tracer.adapters import trial


def test_the_same_model_shows_no_difference():
    ours = trial.tiny_model(seed=1)
    found = trial.compare(CausalLM(ours), ours, num_windows=2)
    assert found.is_none
    assert found.num_rows == 2 * 3 * trial.NUM_TOKENS


def test_another_routing_and_other_logits_are_found():
    ours, other = trial.tiny_model(seed=1), trial.tiny_model(seed=1)
    with torch.no_grad():
        other.layers[2].mlp.gate.expert_bias += torch.linspace(0, 0.2, 48)
    found = trial.compare(CausalLM(other), ours, num_windows=1)
    assert 0 < found.num_differing < found.num_rows
    assert not found.is_none
    other = trial.tiny_model(seed=1)
    with torch.no_grad():
        other.lm_head.weight[3, 4] += 1e-3
    found = trial.compare(CausalLM(other), ours, num_windows=1)
    assert found.num_differing == 0
    assert found.logits > trial.TOLERANCE
    assert not found.is_none


def test_bfloat16_holds_the_tiny_model():
    for tensor in trial.tiny_model(seed=3).state_dict().values():
        assert torch.equal(tensor, tensor.bfloat16().float())


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "no configuration_llada2_moe.py and no modeling_llada2_moe.py"),
        (("configuration_llada2_moe.py",), "no modeling_llada2_moe.py; name a directory"),
    ],
)
def test_missing_code_is_one_line(tmp_path, capsys, files, message):
    for name in files:
        (tmp_path / name).touch()
    assert trial.main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    with pytest.raises(SystemExit) as ended:
        trial.main([str(tmp_path), "--windows", "0"])
    assert ended.value.code == 2
    assert "--windows 0: must be at least 1" in capsys.readouterr().err
