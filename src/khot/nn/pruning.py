"""Pruning, softly: which weights are kept is learned together with their values."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from khot._core import arguments
from khot.nn._handed_out import look
from khot.nn._pruned import Pruned
from khot.nn._pruning_groups import Blocks, By, Group, Member, kind
from khot.nn._values import Value
from khot.nn.anneal import Anneal

__all__ = ["make_permanent", "prune_global", "prune_magnitude", "prune_n_m"]


def prune_magnitude(
    module: nn.Module, name: str, amount: int | Value, *, tau: Value = 1.0, p: float = 2.0
) -> nn.Module:
    """Prune a parameter: all but its largest entries in magnitude become 0, softly in train mode.

    The parameter becomes a ``torch.nn.utils.parametrize`` parametrisation of itself. In train mode its value
    is the rescaled :func:`khot.soft_topk_magnitude` of the learned tensor, taken as one row. Kept entries are
    unchanged and the others 0. Those around the threshold are between 0 and their learned value, so that they
    get a gradient and can still be kept or pruned. In eval mode the selection is hard.

    Args:
        module: the module that owns the parameter.
        name: the parameter's name, such as ``"weight"``.
        amount: how much to prune, as for :mod:`torch.nn.utils.prune`: an int is a number of entries, a float
            in [0, 1] a share of them, rounded; or a module that gives a share (:class:`khot.nn.Anneal`, to
            prune gradually).
        tau: temperature > 0; a number or a module that gives one. With p = 2 it is a ratio: the entries
            between the threshold and (1 + tau) times the threshold are reduced and not yet 0.
        p: the norm, as for :func:`khot.soft_topk_magnitude`.

    Returns:
        The module, changed in place. The learned tensor is ``module.parametrizations[name].original``, the
        same Parameter as before, so that an optimizer made earlier still trains it. In eval mode all pruned
        entries are exactly 0; in train mode some of them are.

    Raises:
        ValueError: amount, tau or p out of range, a tensor that is parametrised already.
        AttributeError: no parameter of that name.

    Source: Sander et al. 2023, section 6. Their code returns y + τ·y^(p−1), too, though the paper does not
    mention it: with it a kept weight has the same size in both modes, whatever tau.

    Example:
        >>> layer = torch.nn.Linear(4, 1, bias=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([-3.0, 1.0, 2.0, 1.8]))
        >>> _ = khot.nn.prune_magnitude(layer, "weight", 0.5, tau=0.5)
        >>> layer.weight.data
        tensor([[-3.0000,  0.0000,  1.4400,  0.8400]])
        >>> layer.eval().weight.data
        tensor([[-3.,  0.,  2.,  0.]])
    """
    prune_global([(module, name)], amount, tau=tau, p=p)
    return module


def prune_global(
    parameters: Iterable[tuple[nn.Module, str]],
    amount: int | Value,
    *,
    tau: Value | None = None,
    p: float = 2.0,
    by: By = "magnitude",
    min_share: float = 0.0,
    max_share: float = 1.0,
    cost: Sequence[float | Tensor] | None = None,
) -> None:
    """Prune many parameters as if they were one: all their entries compete for the same places.

    As :func:`prune_magnitude`, with the entries of all parameters in one row. The selection is made once per
    forward pass of the model: the first layer that needs its weight computes the weights of all of them. The
    parameters have to be on one device. Several threads may run the model at the same time; each of them
    makes its own selection.

    Args:
        parameters: (module, name) pairs, as for ``torch.nn.utils.prune.global_unstructured``. A parameter
            that several modules share (tied weights) is given for each of them; it counts once and is pruned
            alike in all of them, and its costs add up. A module that is not given goes on with all values.
        amount, tau, p: as for :func:`prune_magnitude`; amount is of the entries of all parameters together.
            tau has to be given with ``by="score"``, and is 1 otherwise.
        by: ``"magnitude"``, or ``"score"`` for scores that are learned.
        min_share: the least share of the entries of each parameter that is kept, in [0, 1], rounded to a
            number of entries. It protects small layers, and those with small weights, from being pruned away.
        max_share: the largest share of each parameter that is kept, in [min_share, 1].
        cost: what a kept entry costs, such as its multiply-adds: for each parameter, in their order, a number
            ≥ 0 or a tensor that broadcasts to it. ``amount`` is then in units of cost: an int is the cost
            that is pruned away, a float its share of the cost of all entries. An entry of cost 0 is kept.
            Not with ``min_share`` and ``max_share``, and not for DTensors.

    With ``by="score"`` every entry has a score, a parameter that starts at 0 and is learned with the weights.
    In train mode an entry is multiplied by its value in the soft top-k of all scores, so that a weight of any
    size can be kept or pruned, and one that is nearly pruned still has a gradient; in eval mode the entries
    of the largest scores are kept. With a ``cost``, :func:`khot.soft_budget` of the scores takes the place of
    the soft top-k. The scores are parameters of the model, ``module.parametrizations[name][0].score``, so
    make the optimizer afterwards, without weight decay for them. ``tau`` is in units of the scores, which
    Adam moves by about its learning rate in each step: let it fall from 100 rates to 1 while ``amount``
    grows. ``p`` is 2.

    With a cost c, the kept entries w are those of largest abs(w)/√c. They are the choice that changes the
    weights least, in the sum of squares, for what it costs. The hard selection never exceeds the budget, but
    for rounding. In train mode, the entries are multiplied by factors in [0, 1] that spend it exactly, from
    :func:`khot.soft_budget` of log(abs(w)/√c); with p = 2, those between the threshold and e^τ times the
    threshold are reduced and not yet 0.

    With ``min_share`` and ``max_share``, the hard selection is the best that observes them: each parameter
    keeps its ``min_share`` largest entries, can keep its ``max_share`` largest ones, and what is between
    competes with the other parameters. In train mode, a parameter at a bound is selected by itself, with that
    number of entries, and the others share what is left. The total is always that of ``amount``.

    Parameters that are DTensors (of FSDP2, of tensor parallelism) stay where they are: the processes exchange
    a few sums, as for ``group=`` in :func:`khot.soft_topk_magnitude`, and a weight is placed as its parameter
    is. Where FSDP2 gathers a module's parameters for its forward pass, that module gets its whole weight, and
    the selection is made once per wrapped module. Prune first, then call ``fully_shard``.

    Under ``torch.compile`` and the transforms of ``torch.func`` every layer computes the selection.

    By magnitude, a parameter that starts at 0, or is smaller than the others, can be pruned as a whole from
    the start. It then gets no gradient and never learns. The call warns of that if the values can be read and
    amount and tau are numbers or :class:`khot.nn.Anneal`.

    The copy of a model is pruned by itself. The copy of a module without others that it was pruned with
    raises RuntimeError when it is used. So do the others of a module whose parametrisation was removed. What
    is written into a pruned weight is lost, because it is computed at each use. When the thread that wrote it
    asks for the next pruned weight, it gets a UserWarning, or a RuntimeError if it wrote through ``.data``.
    Values that are changed in place through ``.data`` are not noticed on a GPU, and on the CPU by a sample of
    the entries.

    Every layer's weight can be part of a loss of its own, and these losses can be backpropagated together or
    one after the other. A learned tensor may be changed in place at any time. Between two layers of one
    forward pass, a change that PyTorch does not count (through ``.data`` or NumPy) is noticed by the layer
    whose tensor it is, and on the CPU only.

    Raises:
        ValueError, AttributeError: as :func:`prune_magnitude`; also for no parameters, or one that is given
            twice, or that a given module or one of its submodules has under another name, too; for scores
            without a tau; for shares out of range, or with which the amount cannot be kept; and for a cost
            that is negative or not finite, does not broadcast, or is not one per parameter.
        TypeError: parameters are not pairs (module, name).

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))
        >>> khot.nn.prune_global([(model[0], "weight"), (model[2], "weight")], amount=0.9)
        >>> _ = khot.nn.make_permanent(model)
        >>> sum(int((model[i].weight != 0).sum()) for i in (0, 2))
        75

        A convolution uses its weights once for each pixel of its output, here 14 · 14 times, and a linear
        layer once. Half of all multiply-adds are pruned away:

        >>> convolution, linear = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Linear(1568, 10)
        >>> parameters = [(convolution, "weight"), (linear, "weight")]
        >>> khot.nn.prune_global(parameters, amount=0.5, cost=[14 * 14, 1])
        >>> kept = [int((module.eval().weight != 0).sum()) for module, _ in parameters]
        >>> 0.49 < (14 * 14 * kept[0] + kept[1]) / (14 * 14 * 216 + 15680) <= 0.5
        True
    """
    if not (isinstance(parameters, Iterable) and all(map(_is_pair, members := list(parameters)))):
        raise TypeError(
            "parameters must be pairs (module, name), such as "
            '[(m, "weight") for m in model.modules() if isinstance(m, torch.nn.Linear)]'
        )
    if not members or len({(id(module), name) for module, name in members}) < len(members):
        raise ValueError(f"parameters must be one or more, each given once, but got {members}")
    for module, name in members:
        _plain_parameter(module, name)
    if tau is None and by == "score":
        raise ValueError(
            "tau must be given with by='score', in units of the scores, and should fall: for Adam at a rate "
            "r, such as khot.nn.Anneal(100 * r, r, steps)"
        )
    _check_all_users_are_given(members)
    group = Group(members, amount, 1.0 if tau is None else tau, p, by, min_share, max_share, cost)
    _warn_of_what_never_learns(group)
    scores = group.new_scores() if by == "score" else None
    for index in range(len(members)):
        part = Pruned(group, index)
        if scores is not None:
            part.score = scores[group.places[index]]
        part.register()


def prune_n_m(
    module: nn.Module, name: str, n: int = 2, m: int = 4, dim: int = 1, *, tau: Value = 1.0
) -> nn.Module:
    """Prune a parameter to at most n nonzero entries of every m, the pattern that sparse tensor cores run.

    As :func:`prune_magnitude` with p = 2, with every m consecutive entries along a dimension as a row of its
    own: soft in train mode, hard in eval mode. A tensor that several modules share (tied weights) needs a
    call for each of them.

    Args:
        module: the module that owns the parameter.
        name: the parameter's name, such as ``"weight"``.
        n: how many entries of each m are kept, in [0, m]. Hardware supports 2 of 4.
        m: the length of the rows. It has to divide the parameter's size along ``dim``.
        dim: the dimension that the m entries are consecutive in; 1 is the input of linear layers and of
            convolutions, which their products sum over.
        tau: temperature > 0, as for :func:`prune_magnitude`.

    Returns:
        The module, changed in place, as :func:`prune_magnitude`. :func:`make_permanent` makes the pattern
        permanent.

    Raises:
        ValueError: n, m or tau out of range, a size that m does not divide, a tensor that is parametrised
            already.
        AttributeError: no parameter of that name.
        IndexError: no such dimension.

    Example:
        >>> layer = torch.nn.Linear(8, 1, bias=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([3.0, 1.0, 2.0, 1.8, 0.1, 0.0, -0.4, 0.2]))
        >>> khot.nn.prune_n_m(layer, "weight").eval().weight.data
        tensor([[ 3.0000,  0.0000,  2.0000,  0.0000,  0.0000,  0.0000, -0.4000,  0.2000]])
    """
    parameter = _plain_parameter(module, name)
    arguments.check_integer(m, "m", low=1)
    arguments.check_integer(n, "n", low=0, high=m)
    dim = arguments.check_dim(parameter, dim)
    size = parameter.shape[dim]
    if size % m:
        raise ValueError(f"m must divide the size of {name!r} along dim {dim}, which is {size}, but got {m}")
    Pruned(Blocks((module, name), n, m, dim, tau), 0).register()
    return module


def make_permanent(module: nn.Module) -> nn.Module:
    """Make the pruned parameters of a module and its submodules plain parameters again, zeros included.

    The values are those of eval mode, in which exactly the pruned entries are 0. Parameters that were pruned
    together become permanent together, also where some of them belong to another module.

    Args:
        module: a model with pruned parameters. Give the whole model: only in it, and in the modules whose
            parameters are pruned, other users of a tensor are found.

    Returns:
        The module, changed in place. The parameters are still the same objects. Parametrisations that were
        added to a pruned parameter later stay.

    Raises:
        ValueError: a module without pruned parameters, or a tensor with another user (tied weights) that is
            not pruned, or in another way, so that its values would change. Nothing was changed then.
        RuntimeError: parameters that were pruned with others are there without them, as in the copy of one
            layer; or something was written into a pruned weight just before, and would be lost.

    Example:
        >>> layer = khot.nn.prune_magnitude(torch.nn.Linear(4, 5), "weight", 12)
        >>> khot.nn.make_permanent(layer)
        Linear(in_features=4, out_features=5, bias=True)
        >>> int((layer.weight == 0).sum())
        12
    """
    groups = list(dict.fromkeys(part.group for part in module.modules() if isinstance(part, Pruned)))
    if not groups:
        raise ValueError(f"module must have a pruned parameter, but got {module}")
    look()
    for group in groups:
        group.check()
    _check_other_users(module, groups)
    for group in groups:
        with torch.no_grad():
            weights, _ = group.select(hard=True)
        for index, (owner, name) in group.members.items():
            owner.parametrizations[name][0].remove(weights[group.places[index]])  # type: ignore[union-attr, index]
    return module


def _plain_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter of that name, which is not parametrised."""
    if parametrize.is_parametrized(module, name):
        raise ValueError(f"name must be a tensor that is not parametrised, but {name!r} is")
    return module.get_parameter(name)


def _check_all_users_are_given(members: list[Member]) -> None:
    """Raise if a module has a parameter that is pruned under another name, too, which is not given."""
    given = {(id(module), name) for module, name in members}
    pruned = {id(module.get_parameter(name)): name for module, name in members}
    for module in dict.fromkeys(module for module, _ in members):
        for path, user in module.named_modules():
            for name, parameter in user.named_parameters(recurse=False, remove_duplicate=False):
                if id(parameter) in pruned and (id(user), name) not in given:
                    raise ValueError(
                        "parameters must have all users of a tensor, but "
                        f"{f'{path}.{name}'.lstrip('.')!r} of a {kind(module)} is the same tensor as "
                        f"{pruned[id(parameter)]!r}: give both, or assign a copy to one of them"
                    )


def _check_other_users(module: nn.Module, groups: list[Group | Blocks]) -> None:
    """Raise if a tensor that becomes permanent has another user, whose values this would change."""
    uses: dict[int, list[tuple[Group | Blocks, int]]] = {}
    for group in groups:
        for place, original in enumerate(group.originals()):
            uses.setdefault(id(original), []).append((group, place))
    owners = [member for group in groups for member in group.members.values()]
    lists = {id(owner.parametrizations[name]) for owner, name in owners}  # type: ignore[index]
    for root in (module, *(owner for owner, _ in owners)):
        for path, user in root.named_modules():
            for name, parameter in () if id(user) in lists else user.named_parameters(recurse=False):
                for group, place in uses.get(id(parameter), ()):
                    if not _equal(parameter, _permanent(group, place)):
                        raise ValueError(_shares(group, place, f"{path}.{name}".lstrip("."), "is not pruned"))
    for (group, place), *others in uses.values():
        for other, at in others:
            if not _equal(_permanent(group, place), _permanent(other, at)):
                owner, name = other.first[at]
                raise ValueError(
                    _shares(group, place, f"{name} of {kind(owner)}", "is pruned in another way")
                )


def _permanent(group: Group | Blocks, place: int) -> Tensor:
    with torch.no_grad():
        return group.select(hard=True)[0][place]


def _equal(x: Tensor, y: Tensor) -> bool:
    x, y = (each.to_local() if arguments.is_dtensor(each) else each for each in (x, y))  # type: ignore[attr-defined]
    return not arguments.has_data(x) or torch.equal(x, y)


def _shares(group: Group | Blocks, place: int, user: str, how: str) -> str:
    owner, name = group.first[place]
    return (
        f"module must not have other users of a pruned tensor, but {user!r} is the same tensor as the pruned "
        f"{name!r} of a {kind(owner)}, and {how}. Its values would change: assign a copy to it (a new "
        "Parameter), or prune all users together, in one call of khot.nn.prune_global"
    )


def _warn_of_what_never_learns(group: Group) -> None:
    """Warn of tensors that are pruned from the start as a whole, so that they get no gradient."""
    amount, tau = (x.start if isinstance(x, Anneal) else x for x in (group.amount, group.tau))
    tensors = group.of_places(lambda module, name: module.get_parameter(name))
    if group.by == "score" or len(tensors) == 1 or torch.is_inference_mode_enabled():
        return
    if isinstance(amount, nn.Module) or isinstance(tau, nn.Module):  # nothing is known about them
        return
    if not all(arguments.has_data(x) and not x.is_inference() for x in tensors):
        return
    parts = group.soft([x.detach() for x in tensors], amount, tau)
    if all(torch.stack([x.any() for x in parts]).tolist()):
        return
    leaves = [x.detach().requires_grad_() for x in tensors]
    with torch.enable_grad():
        soft = torch.cat([x.flatten() for x in group.soft(leaves, amount, tau)])
        grads = torch.autograd.grad(soft.sum(), leaves)
    learn = torch.stack([grad.any() for grad in grads]).tolist()
    learned = [x.requires_grad and x.numel() > 0 for x in tensors]
    places = enumerate(group.places)
    stuck = [(i, group.members[i]) for i, place in places if learned[place] and not learn[place]]
    if stuck and any(learn):
        names = [f"parameters[{i}] ({name} of {kind(module)})" for i, (module, name) in stuck]
        more = f" and {len(names) - 3} more" * (len(names) > 3)
        warnings.warn(
            f"all entries of {', '.join(names[:3])}{more} are pruned from the start, because they are 0 or "
            "smaller than those of the other parameters. They get no gradient, and never learn. Use "
            "by='score', or keep some entries of each parameter by min_share, or let amount grow from 0, by "
            "khot.nn.Anneal(0.0, amount, steps)",
            UserWarning,
            stacklevel=3,
        )


def _is_pair(member: object) -> bool:
    if not isinstance(member, (tuple, list)) or len(member) != 2:
        return False
    return isinstance(member[0], nn.Module) and isinstance(member[1], str)
