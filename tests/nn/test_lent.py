"""What is written into the tensors that a TopKSAE computes from its parameters: lost, but not in silence."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from drawn import normal as scores
from khot.nn import TopKSAE


def make(dtype: torch.dtype = torch.float64) -> TopKSAE:
    torch.manual_seed(0)
    sae = TopKSAE(5, 12, 3, dtype=dtype, centre=False)
    sae.bias = 0.1 * scores(5).to(dtype)
    return sae


WRITES: dict[str, Callable[[Tensor], object]] = {
    "a method": lambda x: x.mul_(2),
    "init": lambda x: torch.nn.init.normal_(x),
    "copy": lambda x: x.copy_(torch.ones_like(x)),
    "a part": lambda x: x[1:2].zero_(),
    "an entry": lambda x: x.view(-1).__setitem__(2, 3.0),
    "an operator": lambda x: torch.add(x, 1, out=x.detach()),
    "data": lambda x: x.data.mul_(2),
    "a part of data": lambda x: x.data[-1].fill_(7),
    "the order of data": lambda x: x.data.copy_(x.flip(0)),
    "numpy": lambda x: x.detach().view(torch.int16).numpy().fill(1),
}
READS: dict[str, Callable[[TopKSAE, str], object]] = {
    "forward": lambda sae, name: sae(scores(7, 5).to(sae.shift.dtype)),
    "loss": lambda sae, name: sae.loss(scores(7, 5).to(sae.shift.dtype)),
    "top": lambda sae, name: sae.eval().top(scores(7, 5).to(sae.shift.dtype)),
    "the same": getattr,
    "another": lambda sae, name: sae.bias if name == "encoder" else sae.encoder,
    "state": lambda sae, name: torch.nn.Sequential(sae).state_dict(),
}
UNCOUNTED = {"data", "a part of data", "the order of data"}


# each name in each dtype, in another one for each way to write
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    ("how", "name", "dtype"),
    [
        (how, name, (torch.float64, torch.float32, torch.bfloat16)[(i + j) % 3])
        for i, how in enumerate(WRITES)
        for j, name in enumerate(("encoder", "decoder", "bias"))
    ],
    ids=str,
)
def test_says_that_what_is_written_is_lost(
    how: str, name: str, dtype: torch.dtype, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large tensors are not compared, as tensors on a GPU are not: there it is what torch counts."""
    if large:
        monkeypatch.setattr("khot.nn._lent.ENTRIES", 3)
    for seed, (read, call) in enumerate(READS.items()):
        sae = make(dtype)
        kept = {n: v.clone() for n, v in sae.state_dict().items()}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(sae, name)
        sae.load_state_dict(kept)
        before = getattr(sae, name).clone()
        with torch.no_grad():
            torch.manual_seed(seed)
            WRITES[how](getattr(sae, name))
        if large and how in {*UNCOUNTED, "numpy"}:
            call(sae, name)
        else:
            message = f"what was written into the {name} of this TopKSAE is lost.* as in sae.{name} = x"
            with pytest.warns(UserWarning, match=message):
                call(sae, name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it has been said
            call(sae, name)
            sae.load_state_dict(kept)
            assert getattr(sae, name).equal(before), read


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_says_nothing_of_what_is_not_lost(
    dtype: torch.dtype, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr("khot.nn._lent.ENTRIES", 3)
    torch.manual_seed(0)
    sae = make(dtype)
    x = scores(20, 5).to(dtype)
    with torch.no_grad():
        sae.bias += 1  # Python assigns the result
        for name in ("encoder", "decoder", "bias"):
            value = getattr(sae, name)
            value.mul_(2)
            setattr(sae, name, value)
            getattr(sae, name).clone().zero_()
    sae.bias = x.mean(0)
    optimizer = torch.optim.Adam(sae.parameters(), lr=0.01)
    for step in range(4):  # parameters move between what is read and the next pass, with and without a count
        optimizer.zero_grad()
        norms = sae.encoder.norm() + sae.decoder.norm() + sae.bias.norm()
        (sae.loss(x).to(dtype) + 0.01 * norms).backward()
        optimizer.step()
        _ = sae.encoder, sae.decoder, sae.bias
        if step == 2:
            sae.raw_encoder.data.mul_(0.9)
            sae.mean.data.add_(0.1)
    with torch.no_grad():
        sae.raw_decoder[2] = float("nan")
    _ = sae.decoder
    sae.dead(1)
    sae.state_dict()
    torch.nn.Parameter(sae.encoder.detach()).requires_grad_()
    copied = copy.deepcopy(sae)
    sae.encoder.detach().zero_()
    copied.encoder_bias.detach().zero_()
    copied(x.nan_to_num())
    sae.encoder = torch.ones(12, 5, dtype=dtype)
    sae.state_dict()


def test_tells_of_lost_writes_only_where_it_may_look() -> None:
    """Neither compiled nor exported code, nor transforms, nor fake tensors have any of it."""
    sae, x = make(), scores(7, 5)
    torch.compiler.reset()

    def pull(x: Tensor) -> Tensor:
        return sae.loss(x) + sae.encoder.square().mean() + sae.decoder.square().mean() + sae.bias.mean()

    want = pull(x)
    got = torch.compile(pull, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, want)
    sae.eval()
    torch.testing.assert_close(
        torch.vmap(lambda x: sae(x) + sae.bias)(torch.stack([x, x])), torch.stack([sae(x) + sae.bias] * 2)
    )
    program = torch.export.export(sae, (x,)).module()
    torch.testing.assert_close(program(x), sae(x))
    with FakeTensorMode():
        fake = TopKSAE(5, 12, 3)
        fake.encoder.data.mul_(2)
        fake(torch.empty(7, 5))
    with torch.device("meta"):
        TopKSAE(5, 12, 3).encoder.data.mul_(2)
    with torch.inference_mode():
        sae.encoder.mul_(2)
        with pytest.warns(UserWarning, match="written into the encoder"):
            sae(x)
