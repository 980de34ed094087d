"""Balancers in the mixtures of experts of Hugging Face, and the callbacks that update them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import khot.transformers
import processes
from khot import _callbacks
from khot.nn import QuantileBalancer
from khot.transformers import balance, unbalance

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "eos_token_id": None,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=8))


def qwen2() -> Any:
    config = transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=8)
    return transformers.Qwen2MoeForCausalLM(config)


def qwen3() -> Any:
    options: dict[str, Any] = {"head_dim": 8, "norm_topk_prob": True}
    config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, **options)
    return transformers.Qwen3MoeForCausalLM(config)


def olmoe() -> Any:
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**SIZES, **EXPERTS))


def deepseek() -> Any:
    options: dict[str, Any] = {
        **SIZES, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4,
        "topk_group": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 0, "q_lora_rank": 8,
        "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    }  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**options))


MODELS: list[Callable[[], Any]] = [mixtral, qwen2, qwen3, olmoe, deepseek]
each = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)


def tokens(rows: int = 2, length: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(seed))


def skewed(make: Callable[[], Any]) -> Any:
    """A model whose routers prefer the last experts, in train mode."""
    generator = torch.Generator().manual_seed(0)
    model = make()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3, generator=generator)
        if name.endswith("gate.weight"):
            parameter.data *= torch.linspace(0.1, 4, len(parameter)).unsqueeze(-1)
    return model.train()


def trained(model: Any, steps: int = 3) -> list[QuantileBalancer]:
    balancers = balance(model)
    for step in range(steps):
        model(tokens(16, seed=step)).logits.sum().backward()
        QuantileBalancer.update_all(model)
    return balancers


@each
def test_a_balanced_model_computes_what_it_did(make: Callable[[], Any]) -> None:
    """Until its biases move: logits of tokens and routers, gradients, auxiliary losses, what it generates."""
    model = skewed(make)
    plain, kept = copy.deepcopy(model), [name for name, _ in model.named_parameters()]
    balancers = balance(model)
    assert len(balancers) == 2 and balance(model) == balancers
    assert [name for name, _ in model.named_parameters()] == kept
    options = {} if make is deepseek else {"output_router_logits": True}
    want, got = (m(tokens(), labels=tokens(), **options) for m in (plain, model))
    assert torch.equal(got.logits, want.logits) and torch.equal(got.loss, want.loss)
    if options:
        assert len(got.router_logits) == 2
        assert all(map(torch.equal, got.router_logits, want.router_logits))
    want.loss.backward()
    got.loss.backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    ways = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.eval().generate(tokens(), **ways), plain.eval().generate(tokens(), **ways))


@each
def test_updates_even_the_loads(make: Callable[[], Any]) -> None:
    model = skewed(make)
    balancers = balance(model)
    worst = []
    for _ in range(12):
        model(tokens(64))
        QuantileBalancer.update_all(model)
        assert all(balancer.load.sum() == 2 * 64 * 9 for balancer in balancers)
        worst.append(_callbacks.loads(model)["violation"])
    assert worst[0] > 0.25 and worst[-1] < 0.25 * worst[0]


@each
def test_what_is_saved_is_found_again(make: Callable[[], Any], tmp_path: Path) -> None:
    model = skewed(make)
    balancers = trained(model)
    assert all(balancer.bias.std() > 0 for balancer in balancers)
    want = model.eval()(tokens()).logits
    for name, options in (("one", {}), ("several", {"max_shard_size": "20KB"})):
        model.save_pretrained(tmp_path / name, **options)
        again = type(model).from_pretrained(tmp_path / name)
        if make is not deepseek:  # which has its biases without us
            assert not torch.equal(again.eval()(tokens()).logits, want)
        found = balance(again)
        for one, other in zip(found, balancers, strict=True):
            assert torch.equal(one.bias, other.bias) and one.updates == other.updates
        assert torch.equal(again.eval()(tokens()).logits, want)
    states = copy.deepcopy(model), skewed(make)
    balance(states[1])
    states[1].load_state_dict(model.state_dict())
    for each in states:
        assert torch.equal(each.eval()(tokens()).logits, want)


def test_the_biases_of_deepseek_are_those_of_the_balancer(tmp_path: Path) -> None:
    """What is saved runs where nobody knows of balancers; and its biases are where balancers begin."""
    model = skewed(deepseek)
    trained(model)
    want = model.eval()(tokens()).logits
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(plain(tokens()).logits, want)
    plain.name_or_path = ""
    balance(plain)
    torch.testing.assert_close(plain(tokens()).logits, want)
    unbalance(plain)
    assert torch.equal(plain(tokens()).logits, want)


@each
def test_unbalance_leaves_nothing(make: Callable[[], Any]) -> None:
    model = skewed(make)
    classes, keys = [type(m) for m in model.modules()], list(model.state_dict())
    balance(model)
    unbalance(model)
    assert [type(m) for m in model.modules()] == classes and list(model.state_dict()) == keys
    with pytest.raises(ValueError, match="must have been balanced"):
        unbalance(model)


def test_a_folder_that_is_gone_and_one_of_another_model(tmp_path: Path) -> None:
    """Neither raises, and no router is left without its balancer."""
    model = skewed(olmoe)
    trained(model)
    model.save_pretrained(tmp_path / "a")
    again = type(model).from_pretrained(tmp_path / "a")
    again.name_or_path = str(tmp_path / "gone")
    assert not any(balancer.bias.any() for balancer in balance(again))
    other = mixtral()
    other.config.num_local_experts = 4
    other = type(other)(other.config)
    other.name_or_path = str(tmp_path / "a")  # with as many layers
    assert all(len(balancer.bias) == 4 for balancer in balance(other))
    assert len(balance(torch.nn.Sequential(skewed(mixtral)))) == 2  # type: ignore[arg-type]


def test_biases_are_those_of_the_revision_that_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name of a hub, of which the cache has two revisions."""
    commits = {"a" * 40: 1.0, "b" * 40: 2.0}
    cache = tmp_path / "models--somebody--mixtral"
    for commit, bias in commits.items():
        model = mixtral()
        for balancer in balance(model):
            balancer.bias.fill_(bias)
        model.save_pretrained(cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    own = khot.transformers.cached_file
    monkeypatch.setattr(khot.transformers, "cached_file", partial(own, cache_dir=tmp_path))
    for commit, bias in commits.items():
        again = mixtral()
        again.name_or_path, again.config._commit_hash = "somebody/mixtral", commit
        assert all((balancer.bias == bias).all() for balancer in balance(again))


def test_under_the_hooks_of_accelerate() -> None:
    """Which put a forward pass of their own before that of the class."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model, plain = skewed(qwen3), skewed(qwen3)
    for layer in model.model.layers:
        add_hook_to_module(layer.mlp.gate, AlignDevicesHook("cpu"))
    balancers = balance(model)
    model(tokens())
    assert all(balancer.counts.sum() == 18 * 8 for balancer in balancers)
    balancers[0].bias.copy_(torch.linspace(-4, 0, 8))
    assert not torch.equal(model(tokens()).logits, plain(tokens()).logits)
    unbalance(model)
    assert torch.equal(model(tokens()).logits, plain(tokens()).logits)
    plain.model.layers[0].mlp.gate.forward = lambda x: x
    with pytest.raises(ValueError, match="must have routers whose forward pass is that of their class"):
        balance(plain)
    assert not isinstance(plain.model.layers[1].mlp.gate, khot.transformers._Balanced)


@pytest.mark.parametrize("make", [mixtral, deepseek], ids=lambda make: make.__name__)
def test_a_balanced_model_can_be_pickled(make: Callable[[], Any]) -> None:
    model = skewed(make)
    trained(model)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again.eval()(tokens()).logits, model.eval()(tokens()).logits)
    unbalance(again)
    assert type(again.model.layers[0].mlp.gate) is type(make().model.layers[0].mlp.gate)


def test_newer_biases_of_deepseek_win(tmp_path: Path) -> None:
    model = skewed(deepseek)
    trained(model)
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path).train()
    newer = [balancer.bias.clone() for balancer in trained(model)]
    unbalance(model)
    for balancer, bias in zip(balance(model), newer, strict=True):
        torch.testing.assert_close(balancer.bias, bias)
    plain = skewed(deepseek)
    own = torch.linspace(-1, 0.5, 8)
    for layer in plain.model.layers:
        layer.mlp.gate.e_score_correction_bias.copy_(own)
    missing = model.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert all("balancer.bias" not in key for key in missing)
    for balancer in balance(model):
        torch.testing.assert_close(balancer.bias, own - 0.5)
    rounded = skewed(deepseek).bfloat16()
    balancers = trained(rounded)
    rounded.save_pretrained(tmp_path / "half")
    again = type(rounded).from_pretrained(tmp_path / "half", dtype=torch.bfloat16)
    for balancer, other in zip(balance(again), balancers, strict=True):
        assert torch.equal(balancer.bias, other.bias)


def test_a_model_without_routers() -> None:
    config = transformers.LlamaConfig(**SIZES)
    with pytest.raises(ValueError, match=r"MixtralTopKRouter.*LlamaForCausalLM"):
        balance(transformers.LlamaForCausalLM(config))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@each
def test_half_precision_compile_and_checkpointing(make: Callable[[], Any]) -> None:
    model = skewed(make).to(torch.bfloat16)
    balancers = balance(model)
    model.gradient_checkpointing_enable()
    loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    assert loss.isfinite()
    QuantileBalancer.update_all(model)
    assert all(b.bias.dtype == torch.float32 and b.updates == 1 for b in balancers)
    model = model.float().eval()
    compiled = torch.compile(model.model.layers[0].mlp.gate, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    for got, want in zip(compiled(x), model.model.layers[0].mlp.gate(x), strict=True):
        torch.testing.assert_close(got, want)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        row = tokens(1, seed=i)[0]
        return {"input_ids": row, "labels": row}


def fit(model: Any, folder: Path, steps: int) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Rows(), callbacks=[khot.transformers.BalancerCallback()]
    )
    trainer.train()
    return trainer


def test_the_trainer_updates_logs_and_saves(tmp_path: Path) -> None:
    """It cannot resume a mixture in transformers 5.23, balanced or not, whose files have other names than its
    parameters; a checkpoint is read as any other folder."""
    model = skewed(mixtral)
    balancers = balance(model)
    trainer = fit(model, tmp_path, 4)
    assert all(balancer.updates == 4 for balancer in balancers)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 4 and all(entry["violation"] >= 0 for entry in logs)
    assert all(0 <= entry["least_load"] <= 1 for entry in logs)
    for steps in (2, 4):
        again = type(model).from_pretrained(tmp_path / f"checkpoint-{steps}")
        assert all(balancer.updates == steps for balancer in balance(again))
    torch.testing.assert_close(again.state_dict(), model.state_dict())


def balanced_in_parts(group: Any, batches: list[Tensor]) -> list[Tensor]:
    model = skewed(olmoe)
    balance(model)
    for batch in batches:
        model(batch.chunk(processes.MOST)[group.rank()])
        _callbacks.update_balancers(model)
    return [buffer for balancer in balance(model) for buffer in (balancer.bias, balancer.load)]


def test_processes_balance_as_one() -> None:
    batches = [tokens(8, seed=seed) for seed in range(3)]
    model = skewed(olmoe)
    balancers = balance(model)
    for batch in batches:
        model(batch)
        QuantileBalancer.update_all(model)
    want = [buffer for balancer in balancers for buffer in (balancer.bias, balancer.load)]
    for got in processes.run(0, balanced_in_parts, batches):
        torch.testing.assert_close(got, want)
