"""The sparse autoencoder: its loss and gradients against float64, planted directions that it finds,
dead latents that come to life, and a training that continues to the bit.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from lab.analysis.autoencoder import (
    AUXILIARY,
    Autoencoder,
    Code,
    Settings,
    Trainer,
    dictionary_match,
    fit,
    jaccard,
    scaled,
)

D = 32
PLANTED = Settings(width=2, k=4, tokens=256 * 600, step_tokens=256, lr=0.01)


def planted_directions(count: int, seed: int = 1) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, D, generator=draw), dim=1)


def sums_of(directions_AD: torch.Tensor, active: int):
    """Parts of 2,048 activations, each the sum of `active` of the directions, by part number."""

    def part(number: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(number)
        share_NA = torch.rand(2048, len(directions_AD), generator=draw)
        chosen_Nk = share_NA.topk(active).indices
        weight_Nk = 0.5 + torch.rand(2048, active, generator=draw)
        weight_NA = torch.zeros_like(share_NA).scatter(1, chosen_Nk, weight_Nk)
        return weight_NA @ directions_AD

    return part


@pytest.fixture(scope="module")
def planted():
    """A trainer at the end of its training on planted data, and the directions."""
    directions_AD = planted_directions(48)
    trainer = Trainer(D, PLANTED)
    fit(trainer, sums_of(directions_AD, active=4))
    return trainer, directions_AD


# ---- what it finds


@pytest.mark.slow
def test_planted_directions_are_found(planted):
    trainer, directions_AD = planted
    found = dictionary_match(directions_AD, trainer.autoencoder.directions)
    assert found.share >= 0.9
    assert found.mean >= 0.95
    # and what the live latents stand for is planted
    assert dictionary_match(trainer.autoencoder.directions, directions_AD).share >= 0.9

    before = dictionary_match(directions_AD, Autoencoder(D, PLANTED).decoder)
    assert before.share == 0


# ---- one step


def dense_loss(model: Autoencoder, x_ND, dead_M, k: int):
    """The loss written from its equations, in float64, with gradients of all parameters."""
    encoder_MD, c_M, W_MD, b_D = (
        p.detach().double().requires_grad_()
        for p in (model.encoder, model.encoder_bias, model.decoder, model.bias)
    )
    y_ND = x_ND.double() / x_ND.double().square().mean(1, keepdim=True).sqrt()
    all_NM = (y_ND - b_D) @ encoder_MD.T + c_M

    def kept(values_NM, count):
        threshold_N1 = values_NM.sort(1, descending=True).values[:, count - 1 : count]
        return values_NM.where((values_NM >= threshold_N1) & (values_NM > 0), 0.0)

    made_ND = kept(all_NM, k) @ W_MD + b_D
    variance = (y_ND - y_ND.mean(0)).square().sum()
    unexplained = (made_ND - y_ND).square().sum() / variance

    of_dead_ND = kept(all_NM.where(dead_M, -torch.inf), D // 2) @ W_MD
    error_ND = (made_ND - y_ND).detach()
    auxiliary = (error_ND + of_dead_ND).square().sum() / error_ND.square().sum()
    (unexplained + AUXILIARY * auxiliary).backward()
    return unexplained, [encoder_MD.grad, c_M.grad, W_MD.grad, b_D.grad]


@pytest.mark.parametrize("dead", [0, 40])
def test_loss_and_gradients_equal_float64(dead):
    settings = Settings(k=3, tokens=1000)
    trainer = Trainer(D, settings)
    trainer.idle_M[:dead] = settings.until_dead + 1
    draw = torch.Generator().manual_seed(0)
    x_ND = torch.randn(50, D, generator=draw) * 7
    dead_M = torch.arange(2 * D) < dead
    model = trainer.autoencoder
    with torch.no_grad():
        model.bias += 0.1 * torch.randn(D, generator=draw)
        model.encoder[:dead] *= 0.02  # too small to be chosen

    expected, gradients = dense_loss(model, x_ND, dead_M, 3)
    unexplained, loss = trainer._loss(scaled(x_ND), revive=True)
    loss.backward()
    torch.testing.assert_close(unexplained.double(), expected, rtol=1e-6, atol=0)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad.double(), gradient, rtol=1e-4, atol=1e-6)
    if dead:
        assert model.decoder.grad[dead_M].abs().max() > 0


def test_the_dictionary_steps_orthogonally_to_its_rows():
    trainer = Trainer(D, Settings(k=3, lr=1e-3))
    model = trainer.autoencoder
    before_MD = model.decoder.detach().clone()
    seen = []
    trainer.optimizer.register_step_pre_hook(lambda *_: seen.append(model.decoder.grad.clone()))
    trainer.step(torch.randn(64, D, generator=torch.Generator().manual_seed(0)))

    gradient_MD = seen[0]
    along_M = (gradient_MD * before_MD).sum(1)
    assert gradient_MD.norm() > 1e-4
    assert along_M.abs().max() < 1e-7
    torch.testing.assert_close(model.decoder.norm(dim=1), torch.ones(2 * D))


def test_dead_latents_come_to_life():
    """Latents that are too small to be chosen: only the auxiliary loss reaches them."""
    directions_AD = planted_directions(48)
    settings = dataclasses.replace(PLANTED, tokens=256 * 200)
    alive = {}
    for revive in (True, False):
        trainer = Trainer(D, settings)
        with torch.no_grad():
            trainer.autoencoder.encoder[:40] *= 0.02
        part = sums_of(directions_AD, active=4)
        for number in range(12):
            for x_ND in part(number).split(256):
                trainer.step(x_ND, revive)
        alive[revive] = int((~trainer.dead()).sum())
    assert alive[False] <= 24
    assert alive[True] > alive[False] + 10


def test_a_part_of_any_size_trains_as_small_ones_do():
    """All activations at once: latents die and are revived, and no more tokens pass than asked."""
    x_ND = torch.cat([sums_of(planted_directions(48), active=4)(number) for number in range(8)])
    settings = dataclasses.replace(PLANTED, tokens=6 * 2048)
    left = {}
    for size in (2048, len(x_ND)):
        trainer = Trainer(D, settings)
        with torch.no_grad():
            trainer.autoencoder.encoder[:40] *= 0.02
        revived = []

        def step(x_ND, revive, own=trainer.step, revived=revived):
            revived.append(revive)
            return own(x_ND, revive)

        trainer.step = step
        fit(trainer, x_ND.split(size).__getitem__)
        assert trainer.tokens == settings.tokens
        assert len(trainer.losses) == 6
        assert sum(revived) >= 8
        left[size] = trainer.losses[-1]
    assert left[len(x_ND)] == pytest.approx(left[2048], rel=0.1)


def test_directions_are_those_of_live_latents():
    trainer = Trainer(D, Settings(k=3, tokens=2000))
    with torch.no_grad():
        trainer.autoencoder.encoder[:40] *= 0.02
    trainer.add(sums_of(planted_directions(48), active=4)(0))
    dead_M = trainer.dead()
    assert dead_M.sum() >= 38
    rows_MD = trainer.autoencoder.decoder
    assert torch.equal(trainer.autoencoder.directions, rows_MD[~dead_M])
    assert dictionary_match(rows_MD[:0], rows_MD) == (0.0, 0.0)


def test_scale_and_zeros_do_not_matter():
    trainer = Trainer(D, Settings(k=3))
    x_ND = torch.randn(64, D, generator=torch.Generator().manual_seed(0))
    x_ND[0] = 0
    code = trainer.autoencoder.encode(x_ND)
    larger = trainer.autoencoder.encode(x_ND * 1e4)
    torch.testing.assert_close(larger.value_Nk, code.value_Nk)
    assert trainer.add(x_ND) > 0


# ---- continuing


def short(**changes) -> Settings:
    return Settings(**({"k": 3, "tokens": 2048 * 4, "step_tokens": 256} | changes))


# ---- bad input, and memory


def test_activations_that_are_not_finite_end_the_training():
    with pytest.raises(ValueError, match="in part 0 of its activations"):
        Trainer(D, short()).add(torch.full((64, D), torch.inf))


# ---- comparing


def test_dictionaries_are_matched_by_their_nearest_directions():
    rows_MD = planted_directions(40)
    shuffled_MD = rows_MD[torch.randperm(40, generator=torch.Generator().manual_seed(0))]
    assert dictionary_match(rows_MD, shuffled_MD) == pytest.approx((1.0, 1.0))

    half_MD = torch.cat([rows_MD[:20], planted_directions(20, seed=2)])
    match = dictionary_match(rows_MD, half_MD)
    assert match.share == 0.5
    cosines = [max(float(row @ other) for other in half_MD) for row in rows_MD]
    assert match.mean == pytest.approx(sum(cosines) / 40)


def test_jaccard_counts_active_latents():
    a = Code(torch.tensor([[1.0, 2.0], [1.0, 0.0], [0.0, 0.0]]), torch.tensor([[0, 1]] * 3))
    b = Code(torch.tensor([[1.0, 2.0], [3.0, 2.0], [0.0, 0.0]]), torch.tensor([[1, 2]] * 3))
    # {0, 1} and {1, 2}: 1/3; {0} and {1, 2}: 0; neither has any: 1
    assert jaccard(a, b, 4).item() == pytest.approx((1 / 3 + 0 + 1) / 3)
    assert jaccard(a, a, 4).item() == 1
