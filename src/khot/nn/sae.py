"""A sparse autoencoder with k latents per input."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from khot import cdfs, topk
from khot._core import arguments
from khot._core.arguments import Scalar
from khot._core.precision import wide_dtype, widen
from khot._core.torch_internals import transforms_are_on
from khot.cdfs import CDF, CDFName
from khot.nn._best import best_indices, order
from khot.nn._export import to_onnx
from khot.nn._inputs import check_width
from khot.nn._values import Value, current, describe, has_data, positive

__all__ = ["TopKSAE"]


class TopKSAE(nn.Module):
    """A sparse autoencoder: it writes every input as a sum of at most k of n learned directions.

    With pre-activations a = W(x − b) + c and a selection y of k of them,

        code = y · max(a, 0),    reconstruction = Σ_i code_i D_i + b

    In train mode y is ``khot.soft_topk(a, k)``, so that latents just outside the top k get a gradient, too.
    In eval mode y is the hard top k. Its k values and their indices are then the whole code, and decoding
    reads k rows of D instead of all.

    Args:
        in_features: size of the inputs.
        latents: n, the number of directions.
        k: how many latents per input, in (0, n]; a number or a module that gives one
        (:class:`khot.nn.Anneal`). tau: temperature of the selection, > 0, in the units of the
        pre-activations; as ``k``. cdf: as for :func:`khot.soft_topk`. hard: select hard in train mode, too,
        with the gradient of the soft selection. Train and eval mode then
            use the same selection, at any temperature.
        batch: select k·B latents for a batch of B inputs together, instead of k for each input, so that some
            inputs get more than others. The code of an input then depends on its batch, in eval mode, too.
        device, dtype: of the parameters.

    Attributes:
        encoder, decoder: W and D, both (n, in_features); they start from the same random rows of length 1.
        encoder_bias, bias: c, (n,), and b, (in_features,); 0 at the start.
        idle: (n,), a buffer: how many inputs ago, in train mode, a latent was last used. An input uses a
            latent if a > 0 and y > ½.

    Shape:
        input: (..., in_features), of any floating-point dtype.

        output: the reconstruction, of the input's shape.

    Raises:
        ValueError, TypeError: an argument out of range.

    Sources: Gao et al. 2024 (top-k sparse autoencoders, with a hard selection); Bussmann, Leask, Nanda 2024
    (``batch``).

    Example:
        >>> sae = khot.nn.TopKSAE(16, 64, k=4, tau=0.1)
        >>> x = torch.randn(8, 16)
        >>> loss = (sae(x) - x).square().mean()
        >>> values, indices = sae.eval().top(x)
        >>> values.shape
        torch.Size([8, 4])
        >>> torch.allclose(sae.decode(values, indices), sae(x))
        True
    """

    in_features: int
    latents: int
    hard: bool
    batch: bool
    k: Value
    tau: Value
    cdf: CDF
    encoder: nn.Parameter
    encoder_bias: nn.Parameter
    decoder: nn.Parameter
    bias: nn.Parameter

    idle: Tensor

    def __init__(
        self,
        in_features: int,
        latents: int,
        k: Value,
        *,
        tau: Value = 1.0,
        cdf: CDFName | CDF = "logistic",
        hard: bool = False,
        batch: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("in_features", in_features), ("latents", latents)):
            arguments.check_integer(size, name, low=1)
        positive(k, "k")
        if not isinstance(k, nn.Module) and k > latents:
            raise ValueError(f"k must be at most the number of latents, {latents}, but got {k}")
        self.in_features, self.latents = in_features, latents
        self.hard, self.batch = hard, batch
        self.k, self.tau = positive(k, "k"), positive(tau, "tau")
        self.cdf = cdfs.resolve(cdf)
        self.encoder = nn.Parameter(torch.empty(latents, in_features, device=device, dtype=dtype))
        self.encoder_bias = nn.Parameter(torch.empty(latents, device=device, dtype=dtype))
        self.decoder = nn.Parameter(torch.empty(latents, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(in_features, device=device, dtype=dtype))
        self.register_buffer("idle", torch.empty(latents, dtype=torch.int64, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random directions of length 1, the same in encoder and decoder, and biases of 0."""
        nn.init.normal_(self.decoder)
        with torch.no_grad():
            self.decoder.div_(self.decoder.norm(dim=-1, keepdim=True))
            self.encoder.copy_(self.decoder)
        nn.init.zeros_(self.encoder_bias)
        nn.init.zeros_(self.bias)
        self.idle.zero_()

    def forward(self, input: Tensor) -> Tensor:
        if self.training or self.batch or self._is_traced():
            return self.decode(self.encode(input))
        return self.decode(*self.top(input))

    def encode(self, input: Tensor) -> Tensor:
        """The code, (..., n): soft in train mode, and in eval mode with at most k entries that are not 0."""
        a = self._activations(input)
        rows = a.flatten() if self.batch else a
        k = self._size(a) if self.batch else current(self.k)
        if not self.training:
            return topk.topk_mask(rows, k).view(a.shape) * a.relu()
        y = topk.soft_topk(rows, k, tau=current(self.tau), cdf=self.cdf, hard=self.hard)
        y = y.view(a.shape)
        self._count(a, y)
        return y * a.relu()

    def top(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """The hard code as values and indices, both (..., m): its k largest entries in descending order.

        They are the latents of :meth:`encode` in eval mode; of equally large ones, those of lowest index.
        m = ⌊k + ½⌋. With ``batch`` m is the largest number of latents that an input of the batch has; the
        values of the other inputs end with zeros.
        """
        a = self._activations(input)
        if not self.batch:
            indices = best_indices(a, math.floor(float(current(self.k)) + 0.5))
            return a.gather(-1, indices).relu(), indices
        chosen = topk.topk_mask(a.flatten(), self._size(a)).view(a.shape)
        indices = order(a, chosen, int((chosen != 0).sum(-1).max()))
        return a.gather(-1, indices).relu() * chosen.gather(-1, indices), indices

    def decode(self, code: Tensor, indices: Tensor | None = None) -> Tensor:
        """The reconstruction, (..., in_features), of a code (..., n), or of values (..., m) and indices."""
        if indices is None:
            check_width(code, self.latents, self, "code")
            return F.linear(code, self.decoder.mT, self.bias)
        arguments.check_bool_or_real(code, "code")
        arguments.check_tensor(indices, "indices")
        if indices.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"indices must have dtype torch.int64, but got {indices.dtype}")
        for name, x in (("code", code), ("indices", indices)):
            arguments.check_has_values(x, name, self.decoder)
        if code.shape != indices.shape:
            raise ValueError(
                f"code and indices must have the same shape, but got {tuple(code.shape)} and "
                f"{tuple(indices.shape)}"
            )
        if to_onnx():  # it has no embedding_bag but a loop over the inputs, in float32
            rows = self.decoder[indices]
            return (code.to(rows.dtype).unsqueeze(-2) @ rows).squeeze(-2) + self.bias
        width = indices.shape[-1]
        if not width:  # which F.embedding_bag refuses
            return self.decode(code.new_zeros(*code.shape[:-1], self.latents))
        sums = F.embedding_bag(
            indices.reshape(-1, width),
            self.decoder,
            mode="sum",
            per_sample_weights=code.reshape(-1, width).to(self.decoder.dtype),
        )
        return sums.view(*indices.shape[:-1], self.in_features) + self.bias

    def dead(self, inputs: int) -> Tensor:
        """The share of latents that none of the last ``inputs`` training inputs used: 0-dim, in [0, 1]."""
        return widen(self.idle >= inputs).mean()

    def _is_traced(self) -> bool:
        """Whether sizes must not depend on values, as that of :meth:`top` does on a k that is a tensor.

        ``torch.vmap`` has no rule for the sparse :meth:`decode`.
        """
        k = current(self.k)
        if isinstance(k, Tensor) and (torch.compiler.is_compiling() or not has_data(k)):
            return True
        return not torch.compiler.is_compiling() and transforms_are_on()

    def _activations(self, input: Tensor) -> Tensor:
        check_width(input, self.in_features, self)
        return F.linear(input - self.bias, self.encoder, self.encoder_bias)

    def _size(self, a: Tensor) -> Scalar:
        """How many latents a whole batch gets."""
        inputs = a[..., 0].numel()
        if torch.compiler.is_compiling():  # a number would fix the size of the batch
            return current(self.k) * torch.full((), inputs, dtype=wide_dtype(a.device), device=a.device)
        return current(self.k) * inputs

    def _count(self, a: Tensor, y: Tensor) -> None:
        used = ((a > 0) & (y > 0.5)).view(-1, self.latents).any(0)
        self.idle.copy_(torch.where(used, 0, self.idle + a[..., 0].numel()))

    def extra_repr(self) -> str:
        values = describe(
            in_features=self.in_features, latents=self.latents, k=self.k, tau=self.tau, cdf=self.cdf
        )
        return values + ", hard=True" * self.hard + ", batch=True" * self.batch
