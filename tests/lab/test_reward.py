"""The learned reward: tokens and mixtures, what counts, and its folder."""

import pytest
import torch

from lab.posttrain import reward as rewards
from lab.posttrain.reward import RewardModel
from longhaul import kernels
from model import ModelConfig

V = 61
SHAPE = dict(
    vocab_size=V,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=24,
    init_std=0.3,
)


def model(seed: int = 0) -> RewardModel:
    reward = RewardModel(kernels.decoder(ModelConfig(**SHAPE), seed))
    with torch.no_grad():
        reward.weight.copy_(torch.linspace(-1, 1, 16)[None])
        reward.bias.fill_(0.25)
    return reward.requires_grad_(False)


def responses(T: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    prompts_BP = torch.randint(0, V, (2, 3), generator=generator)
    tokens_BT = torch.randint(0, V, (2, T), generator=generator)
    counts_BT = torch.ones(2, T)
    counts_BT[1, 4:] = 0
    return prompts_BP, tokens_BT, counts_BT


def test_the_reward_is_the_sigmoid_of_a_linear_function_of_the_mean_hidden_state():
    reward = model()
    prompts_BP, tokens_BT, counts_BT = responses()
    hidden_BTD = reward.body.hidden(torch.cat([prompts_BP, tokens_BT], 1))
    means = [hidden_BTD[0, 3:].mean(0), hidden_BTD[1, 3:7].mean(0)]
    wanted = torch.stack([mean @ reward.weight[0] + 0.25 for mean in means]).sigmoid()
    torch.testing.assert_close(reward.forward_hard(prompts_BP, tokens_BT, counts_BT), wanted)


def test_a_folder_gives_back_the_same_rewards(tmp_path):
    saved = model()
    rewards.save(saved, tmp_path / "reward")
    config = rewards.read_config(tmp_path / "reward")
    loaded = RewardModel(kernels.decoder(config, seed=9))
    rewards.load_into(loaded, tmp_path / "reward")
    assert config.vocab_size == V
    assert torch.equal(loaded.forward_hard(*responses()), saved.forward_hard(*responses()))


def test_a_folder_without_a_head_is_no_reward_model(tmp_path):
    rewards.save(model(), tmp_path / "reward")
    (tmp_path / "reward" / rewards.HEAD).unlink()
    with pytest.raises(ValueError, match="reward"):
        rewards.read_config(tmp_path / "reward")


def test_a_head_of_another_width_is_refused(tmp_path):
    saved = model()
    saved.weight = torch.nn.Parameter(torch.zeros(1, 8), requires_grad=False)
    rewards.save(saved, tmp_path / "reward")
    with pytest.raises(ValueError, match=r"\(1, 8\).*\(1, 16\)"):
        rewards.load_into(model(), tmp_path / "reward")


def test_a_damaged_head_is_refused(tmp_path):
    rewards.save(model(), tmp_path / "reward")
    path = tmp_path / "reward" / rewards.HEAD
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match="reward.safetensors"):
        rewards.load_into(model(), tmp_path / "reward")


def test_another_vocabulary_than_the_policys_is_refused():
    policy = ModelConfig(**SHAPE | {"vocab_size": 60})
    with pytest.raises(ValueError, match="61 .* 60"):
        rewards.require_same_vocabulary(ModelConfig(**SHAPE), policy)
