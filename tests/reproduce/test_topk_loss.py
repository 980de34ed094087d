"""Top-k losses: their gradients and accuracies, what learns, and the numbers they learn to read."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import khot
from reproduce.harness import data, study
from reproduce.papers import topk_loss
from reproduce.tasks import numbers


def test_smoke_run(smoke) -> None:
    found = smoke("topk-loss")
    top5 = {m: found.last("top-5", method=m, part="test") for m in topk_loss.NAMES}
    # seed 0: cross-entropy 0.954, Lap-Top-k 0.944 to 0.951, sparse 0.831 and 0.915; by chance 0.05
    assert top5["cross-entropy"] > 0.92
    assert min(top5["last"], top5["even"], top5["ends"], top5["ends-ce"]) > 0.9
    assert min(top5["p=2"], top5["p=4/3"]) > 0.7
    for row in found.rows:
        assert float(row["top-1"]) <= float(row["top-3"]) <= float(row["top-5"]) <= float(row["top-10"])
    assert "| Lap-Top-k, [.5, 0, 0, 0, .5] |" in found.report


@pytest.mark.parametrize("p", [2, 4 / 3])
def test_sparse_loss_follows_the_mask_less_the_label(p: float) -> None:
    scores = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)).requires_grad_()
    label = torch.tensor([0, 5, 50, 99])
    (gradient,) = torch.autograd.grad(4 * topk_loss.sparse(p)(1.0)(scores, label), scores)
    wanted = khot.sparse_topk(scores, 3, p=p).detach()
    wanted[range(4), label] -= 1
    # centred: all scores together are moved nowhere
    torch.testing.assert_close(gradient, wanted - 2 / 100)


def test_noise_stays_within_groups() -> None:
    label = torch.arange(100).repeat(200)
    noisy = topk_loss.confuse(label, 0.6, 0)
    assert torch.equal(noisy // topk_loss.GROUP, label // topk_loss.GROUP)
    # 0.4 + 0.6/5 stay; 20,000 labels: 6 deviations of 0.0035 are 0.021, which fails once in 10⁹ seeds
    assert (noisy == label).double().mean().item() == pytest.approx(0.52, abs=0.021)
    assert torch.equal(topk_loss.confuse(label, 0.0, 0), label)
    assert topk_loss.confuse(label, 1.0, 0)[label == 7].bincount(minlength=10)[5:].min() > 0


def test_half_and_half_is_the_mean_of_its_parts() -> None:
    scores = torch.randn(50, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    label = torch.arange(50)
    both = topk_loss.LOSSES["ends-ce"](2.0)(scores, label)
    half = F.cross_entropy(scores, label) + topk_loss.LOSSES["last"](2.0)(scores, label)
    torch.testing.assert_close(both, half / 2)
    divided = topk_loss.LOSSES["cross-entropy"](2.0)(scores, label)
    torch.testing.assert_close(divided, F.cross_entropy(scores / 2, label))


def test_validation_set_chooses() -> None:
    def row(tau: float, part: str, seed: int, **top: float) -> study.Row:
        values = {f"top-{k}": 0.5 for k in topk_loss.KS} | {
            key.replace("_", "-"): v for key, v in top.items()
        }
        return {"method": "last", "tau": tau, "lr": 0.1, "step": 9, "part": part, "seed": seed, **values}

    rows = [row(tau, part, seed) for tau in (1, 2) for part in ("validation", "test") for seed in (0, 1)]
    rows += [row(4, part, 0, top_5=0.9) for part in ("validation", "test")]  # with one seed only
    rows[4] = row(2, "validation", 0, top_5=0.6)
    rows[6] = row(2, "test", 0, top_1=0.25, top_5=0.1)
    setting, at = topk_loss.chosen(rows)[topk_loss.NAMES["last"]]
    assert setting == (2, 0.1, 9)
    assert at[0] == [25, 50] and at[2] == [10, 50]
    plain = topk_loss.chosen([dict(row, method="cross-entropy") for row in rows])
    assert {name: setting[0] for name, (setting, _) in plain.items()} == {
        topk_loss.PLAIN: 1,
        "cross-entropy": 2,
    }


def test_accuracies_are_those_of_topk() -> None:
    random = torch.Generator().manual_seed(0)
    scores, label = torch.randn(500, 30, generator=random), torch.randint(30, (500,), generator=random)
    for k in topk_loss.KS:
        among = (scores.topk(k).indices == label[:, None]).any(-1).double().mean().item()
        assert topk_loss.accuracies(scores, label)[f"top-{k}"] == among


def test_numbers_are_digits_side_by_side() -> None:
    images = data.load_digits()
    index = numbers.pick((2, 3), 4, seed=1, of=len(images.test_labels))
    pictures, value = numbers.draw(images.test_images, images.test_labels, images.shape, index)
    assert pictures.shape == (2, 3, 8, 32)
    for i in range(2):
        for j in range(3):
            label = [int(images.test_labels[d]) for d in index[i, j]]
            assert value[i, j] == int("".join(map(str, label)))
            for place, d in enumerate(index[i, j]):
                patch = pictures[i, j, :, 8 * place : 8 * place + 8]
                assert torch.equal(patch, images.test_images[d].view(8, 8))
    assert not torch.equal(index, numbers.pick((2, 3), 4, seed=2, of=len(images.test_labels)))
