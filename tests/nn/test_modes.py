"""Every layer in every mode of use: on the meta device, fake, copied, saved, under vmap, with FSDP2."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import modes
import processes

# What cannot work, and the words in which torch says so. docs/numerics.md lists it, too.
PARAMETRIZED = "only supported through state_dict"
IN_PLACE = "vmap: inplace arithmetic"
NOT_SUPPORTED: dict[tuple[str, str, bool], str] = {
    **{
        (name, how, training): PARAMETRIZED
        for name in (
            "prune_global",
            *(f"prune_global-{how}" for how in ("shares", "cost", "score")),
            "prune_n_m",
        )
        for how in ("pickle", "save")
        for training in (True, False)
    },
    # in train mode it counts in a buffer which latents are used
    ("TopKSAE", "vmap", True): IN_PLACE,
    ("TopKSAE-hard", "vmap", True): IN_PLACE,
    ("TopKSAE-batch", "vmap", True): IN_PLACE,
    ("TopKSAE-transcoder", "vmap", True): IN_PLACE,
    ("TopKSAE-annealed", "vmap", True): IN_PLACE,
    ("TopKSAE-batch-annealed", "vmap", True): IN_PLACE,
    # in train mode it counts the tokens
    ("QuantileBalancer", "vmap", True): IN_PLACE,
    ("TokenChoiceRouter-balanced", "vmap", True): IN_PLACE,
    # in train mode it sets its biases
    ("BalancedRouter", "vmap", True): IN_PLACE,
    ("MixtureOfExperts-balanced", "vmap", True): IN_PLACE,
}
# The designs of sampling read values. These layers are only made of fake tensors, and used in eval mode.
READ_VALUES = {"KHotGate", "KHotGate-learned"}

each_layer = pytest.mark.parametrize("name", modes.ROWS)
each_with_inputs = pytest.mark.parametrize("name", [name for name, row in modes.ROWS.items() if row.inputs])
each_mode = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def assert_same(got: nn.Module, want: nn.Module, name: str) -> None:
    inputs = modes.ROWS[name].inputs
    torch.testing.assert_close(modes.output(got, inputs), modes.output(want, inputs), rtol=0, atol=0)


def copy_through_pickle(layer: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(layer))


def copy_through_save(layer: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def copy_through_state_dict(layer: nn.Module, name: str) -> nn.Module:
    other = modes.make(name, seed=1).train(layer.training)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    return other


def copy_through_meta(layer: nn.Module, name: str) -> nn.Module:
    """Made without data, then given memory and the state: how large models are loaded."""
    row = modes.ROWS[name]
    with torch.device("meta"):
        other = row.make(dtype=torch.float64) if row.owns_parameters else row.make()
    tensors = [*other.parameters(), *other.buffers()]
    assert tensors and all(x.device.type == "meta" for x in tensors)
    other = other.to_empty(device="cpu").train(layer.training)
    other.load_state_dict(layer.state_dict())
    return other


COPIES: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "meta": copy_through_meta,
    "pickle": lambda layer, name: copy_through_pickle(layer),
    "save": lambda layer, name: copy_through_save(layer),
    "deepcopy": lambda layer, name: copy.deepcopy(layer),
    "state_dict": copy_through_state_dict,
}


# each layer in either mode by each way, new and used by turns
@pytest.mark.parametrize(
    ("name", "training", "how", "used"),
    [
        pytest.param(name, training, how, used, id=f"{'used' if used else 'new'}-{how}-{training}-{name}")
        for i, name in enumerate(modes.ROWS)
        for j, how in enumerate(COPIES)
        for training in (True, False)
        for used in [(i + j + training) % 2 == 0]
    ],
)
def test_copies(used: bool, how: str, training: bool, name: str) -> None:
    layer = modes.make(name).train(training)
    if used:
        modes.output(layer, modes.ROWS[name].inputs)
    if (name, how, training) in NOT_SUPPORTED:
        with pytest.raises(RuntimeError, match=NOT_SUPPORTED[name, how, training]):
            COPIES[how](layer, name)
        return
    other = COPIES[how](layer, name)
    assert other.training == training
    assert_same(other, layer, name)


@each_layer
@each_mode
def test_fake_tensors(training: bool, name: str) -> None:
    """Shapes and dtypes are known without computing, and nothing reads a value."""
    row = modes.ROWS[name]
    want = modes.output(modes.make(name).train(training), row.inputs)
    with FakeTensorMode() as mode:
        layer = row.make(dtype=torch.float64) if row.owns_parameters else row.make()
        if training and name in READ_VALUES:
            assert all(isinstance(x, FakeTensor) for x in layer.parameters())
            return
        inputs = tuple(mode.from_tensor(x) for x in row.inputs)
        got = modes.output(layer.train(training), inputs)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)


@each_with_inputs
@each_mode
def test_vmap(training: bool, name: str) -> None:
    layer, row = modes.make(name).train(training), modes.ROWS[name]
    several = tuple(torch.stack([x, x.flip(0), x.roll(1, 0)]) for x in row.inputs)
    call = torch.vmap(lambda *inputs: modes.output(layer, inputs), randomness="same")
    if (name, "vmap", training) in NOT_SUPPORTED:
        with pytest.raises(RuntimeError, match=NOT_SUPPORTED[name, "vmap", training]):
            call(*several)
        return
    want = torch.stack([modes.output(copy.deepcopy(layer), tuple(x[i] for x in several)) for i in range(3)])
    got = call(*several)
    torch.testing.assert_close(got, want)


def test_fsdp() -> None:
    """All layers at once, because starting processes takes longest."""
    names = [name for name, row in modes.ROWS.items() if row.inputs]
    for found in processes.run(2, modes.fsdp, names):
        assert len(found) == 2 * len(names)
        wrong = {layer: error for layer, error in found.items() if error}
        assert not wrong, wrong
