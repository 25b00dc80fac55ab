"""The foreign programs: training scripts as users write them, none of which knows foretrace or its workloads.

Each runs as ``python PROGRAM --batch N [--seq N | --image N]`` and as ``foretrace capture PROGRAM -- --batch N``; most
have a ``build(batch=…, seq=…)`` that makes the same step for ``--code`` and ``foretrace trace``. All is random, nothing
is loaded or downloaded. One thread takes a few seconds for the 30 steps that each makes by default, mostly imports.

timm is not among what the tests install: it needs a torchvision of the same build as torch, and there is no
CPU build of it on the usual index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parent / "programs"


@dataclass(frozen=True)
class Program:
    """One script.

    Attributes:
        name: of its file in ``programs/``.
        covers: what it has that others lack.
        sizes: by which it is captured, by name of its option and of the argument of ``build``.
        other: sizes to predict and then to run, each by itself: batch × 4, sequence × 2.5, image × 1.5.
        needs: packages beside PyTorch.
        processes: that torchrun starts.
        builds: whether its ``build`` makes the step that the script runs. That of the compiled program makes it
            without the compiler, and that of a program of several processes needs their process group.
    """

    name: str
    covers: tuple[str, ...]
    sizes: Mapping[str, int]
    other: Mapping[str, int]
    needs: tuple[str, ...] = ()
    processes: int = 1
    builds: bool = True

    @property
    def path(self) -> Path:
        """Of the script."""
        return PROGRAMS / f"{self.name}.py"

    @property
    def code(self) -> str:
        """For ``--code``: the function that makes its step."""
        return f"{self.path}:build"

    def arguments(self, **sizes: int) -> list[str]:
        """Its command line at its own sizes, or at others."""
        return [text for name, size in {**self.sizes, **sizes}.items() for text in (f"--{name}", str(size))]

    @property
    def lacking(self) -> list[str]:
        """Packages that are not installed here."""
        return [name for name in self.needs if find_spec(name) is None]


CATALOGUE = (
    Program("bert_trainer", ("Hugging Face Trainer", "fused AdamW", "schedule"), {"batch": 4, "seq": 48},
            {"batch": 16, "seq": 120}, ("transformers", "accelerate")),
    Program("gpt2_loop", ("transformers in a plain loop", "causal attention", "gradient clipping"),
            {"batch": 4, "seq": 64}, {"batch": 16, "seq": 160}, ("transformers",)),
    Program("vit_images", ("transformers vision model", "patches"), {"batch": 4, "image": 64},
            {"batch": 16, "image": 96}, ("transformers",)),
    Program("t5_translation", ("encoder and decoder", "relative positions", "momentum SGD"), {"batch": 4, "seq": 32},
            {"batch": 16, "seq": 80}, ("transformers",)),
    Program("llama_accumulation", ("accelerate", "gradient accumulation", "bf16 autocast", "grouped-query attention"),
            {"batch": 2, "seq": 32}, {"batch": 8, "seq": 80}, ("transformers", "accelerate")),
    Program("timm_images", ("timm", "depthwise convolutions"), {"batch": 4, "image": 64}, {"batch": 16, "image": 96},
            ("timm",)),
    Program("lightning_autoencoder", ("Lightning loop", "transposed convolutions"), {"batch": 16}, {"batch": 64},
            ("lightning",)),
    Program("compiled_mlp", ("torch.compile",), {"batch": 64}, {"batch": 256}, builds=False),
    Program("cnn_workers", ("loader with worker processes", "Nesterov SGD"), {"batch": 16}, {"batch": 64}),
    Program("mixer_accumulation", ("gradient accumulation", "activation checkpointing"), {"batch": 4}, {"batch": 16}),
    Program("gan_two_optimizers", ("two optimizers", "two backward passes"), {"batch": 16}, {"batch": 64}),
    Program("resized_buffers", ("tensors resized in place", "out= arguments", "RMSprop"), {"batch": 16, "seq": 64},
            {"batch": 64, "seq": 160}),
    Program("gru_forecast", ("recurrent network", "optimizer without foreach"), {"batch": 8, "seq": 32},
            {"batch": 32, "seq": 80}),
    Program("embedding_ranker", ("embedding bags", "Adagrad"), {"batch": 128}, {"batch": 512}),
    Program("ddp_gloo", ("two processes", "DistributedDataParallel", "gloo"), {"batch": 4, "seq": 32},
            {"batch": 16, "seq": 80}, processes=2, builds=False),
)

OTHER_SIZE = "embedding_ranker:batch=256"
"""A second capture of one program, for laws of sizes."""
BY_SHAPES = "gan_two_optimizers"
"""Its step is also traced by shapes, for a GPU."""


def program(name: str) -> Program:
    """The program of a name."""
    return next(each for each in CATALOGUE if each.name == name)
