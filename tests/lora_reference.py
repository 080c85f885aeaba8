"""Reference GRPO on LoRA adapters: PEFT's implementation, and explicitly merged weights for experts."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from tests.grpo_reference import GrpoReference
from tests.parity import separate_experts


class PeftReference(GrpoReference):
    """A model whose PEFT adapters are the only trained parameters. The KL's reference is the model without adapters."""

    def __init__(self, folder: Path, adapters: Path, lr: float, eps: float, temperature: float):
        super().__init__(folder, lr, eps, temperature)
        self.model = PeftModel.from_pretrained(self.model, adapters, is_trainable=True)
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=lr, betas=(0.9, 0.999), eps=eps, weight_decay=0.0)

    def update(self, groups, kl_coefficient: float, clip_norm: float, old=None):
        self.optimizer.zero_grad()
        loss = self.loss(groups, kl_coefficient, old or {})
        loss.backward()
        gradients = {plain_name(name): p.grad.clone() for name, p in self.trained.items()}
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), clip_norm)
        self.optimizer.step()
        return loss.item(), gradients, norm.item()

    def factors(self) -> dict[str, torch.Tensor]:
        return {plain_name(name): p.detach() for name, p in self.trained.items()}

    def merged(self) -> dict[str, torch.Tensor]:
        """Return all weights by their names in the checkpoint. This removes the adapters."""
        return self.model.merge_and_unload().state_dict()


def plain_name(name: str) -> str:
    """Return a PEFT parameter's name as it appears in saved adapters."""
    return name.replace(".default.", ".")


def write_adapters(folder: Path, model: Path, rank: int, alpha: int, modules: str | list[str] = "all-linear") -> Path:
    """Write random adapters with PEFT. B is random instead of zero, so that the adapters change the model."""
    base = GrpoReference(model, 1.0, 1.0, 1.0).model
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    adapted = get_peft_model(base, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(folder)
    return folder


class MergedReference(GrpoReference):
    """A model whose linear weights are W + scale · B · A in plain torch. PEFT cannot adapt experts individually."""

    def __init__(
        self, folder: Path, factors: dict[str, torch.Tensor], scale: float, lr: float, eps: float, temperature
    ):
        """`factors` is keyed by the names in a PEFT adapter file; factors shared by a layer's experts have no expert
        number."""
        super().__init__(folder, lr, eps, temperature)
        self.base, self.model, self.scale = self.model, self._forward, scale
        dtype = torch.get_default_dtype()
        stored = separate_experts(load_file(folder / "model.safetensors"))
        self.stored = {name: weight.to(dtype) for name, weight in stored.items()}
        self.trained = {name: factor.to(dtype, copy=True).requires_grad_() for name, factor in factors.items()}
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=lr, betas=(0.9, 0.999), eps=eps, weight_decay=0.0)

    def update(self, groups, kl_coefficient: float, clip_norm: float, old=None):
        self.optimizer.zero_grad()
        loss = self.loss(groups, kl_coefficient, old or {})
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in self.trained.items()}
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), clip_norm)
        self.optimizer.step()
        return loss.item(), gradients, norm.item()

    def factors(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.trained.items()}

    def merged(self) -> dict[str, torch.Tensor]:
        """Return all weights by their names in the checkpoint."""
        return {name: self._merged(name, weight) for name, weight in self.stored.items()}

    def _merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        inner, outer = (self._factor(name, factor) for factor in ("lora_A", "lora_B"))
        return weight if inner is None else weight + self.scale * outer @ inner

    def _factor(self, name: str, factor: str) -> torch.Tensor | None:
        factor_name = f"base_model.model.{name.removesuffix('.weight')}.{factor}.weight"
        return self.trained.get(factor_name, self.trained.get(re.sub(r"\.experts\.\d+\.", ".experts.", factor_name)))

    def _forward(self, ids: torch.Tensor):
        weights = self.merged()
        layers = {name.partition(".experts.")[0] for name in weights if ".experts." in name}
        for layer in layers:
            experts = f"{layer}.experts."
            if f"{experts}0.gate_up_proj.weight" in weights:  # gpt-oss
                count = len({name for name in weights if name.startswith(experts)}) // 4
                for part in ("gate_up_proj", "down_proj"):
                    for kind, suffix in (("weight", ""), ("bias", "_bias")):
                        stack = [weights.pop(f"{experts}{i}.{part}.{kind}").t() for i in range(count)]
                        weights[f"{experts}{part}{suffix}"] = torch.stack(stack)
                continue
            count = len({name for name in weights if name.startswith(experts) and "gate_proj" in name})
            gate, up, down = (
                torch.stack([weights.pop(f"{experts}{i}.{part}_proj.weight") for i in range(count)])
                for part in ("gate", "up", "down")
            )
            weights |= {f"{experts}gate_up_proj": torch.cat((gate, up), 1), f"{experts}down_proj": down}
        return torch.func.functional_call(self.base, weights, (ids,))
