"""NeuSight's protocol: fit on its train GPUs' train rows, predict its test rows of GPUs never fitted. fp32.

    python benchmarks/neusight_protocol.py [--choices [memory-bound | products]]

Train GPUs are P4, P100, V100, T4 and A100-40G; L4 and A100-80G are never seen. Every choice (formulas, features,
weights of the sources, shape of the power law) has the least error when one *train* GPU is left out of the fit and
predicted; ``--choices`` scores all candidates again (minutes). Test rows took part in none. The data's folder is
FORETRACE_DATA, or `shared/data` beside the checkout.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from cross_device import Measured, Residuals, Size, TransferModel
from cross_device.choices import LAWS, METRICS, chosen, recipe_of, recipes
from cross_device.model import leave_one_out, spread
from cross_device.power import fit_power_law
from cross_device.products import joined
from neusight_data import GROUPS, TRAIN_GPUS, UNSEEN_GPUS, Group, figures, measured, read

from kernel_models.op_call import Family

PUBLISHED = {"elementwise": 19.3, "layer norm": 56.7, "softmax": 13.9, "FC": 13.9, "BMM": 13.8}
"""NeuSight's MAPE over the same rows, %."""
TARGET = {"elementwise": 6.0, "layer norm": 18.0, "softmax": 10.0, "FC": 10.0, "BMM": 12.0}
TARGET_A100 = {"FC": 5.0, "BMM": 7.0}
_ROWS_FOR_CHOICES = 6000


def fitted(train: dict[str, list[Measured]]) -> dict[str, tuple[TransferModel, Residuals]]:
    """The model of each group and its errors on calls of the train GPUs that were left out."""
    result = {}
    for group in GROUPS:
        recipe = with_envelopes(recipe_of(group.family, group.batched), group, train)
        model = TransferModel(group.family, group.batched, recipe)
        residuals = Residuals.of(recipe, chosen(group.family, group.batched).metric, train[group.name])
        result[group.name] = model.fit(train[group.name], residuals=residuals), residuals
    return result


def with_envelopes(recipe: object, group: Group, train: dict[str, list[Measured]]) -> object:
    """A recipe of products with the best rates of both of the train GPUs' product families."""
    if group.family is not Family.GEMM:
        return recipe
    return replace(recipe, envelopes=joined(train["FC"], train["BMM"]))  # type: ignore[type-var]


def mape(errors: np.ndarray) -> float:
    """Mean absolute error, %, of log(predicted / measured)."""
    return float(100 * np.abs(np.expm1(errors)).mean())


def asked(measured: float, wanted: float) -> str:
    """The error that was asked for, %, and whether it is met."""
    return f"asked ≤ {wanted:g}: {'met' if measured <= wanted else 'missed'}"


def summary(errors: np.ndarray) -> str:
    """MAPE, median, signed mean, p90 and largest error, %, and the number of rows."""
    size = 100 * np.abs(np.expm1(errors))
    return (f"{size.mean():8.1f} {np.median(size):8.1f} {100 * np.expm1(errors).mean():+8.1f} "
            f"{np.quantile(size, 0.9):8.1f} {size.max():8.1f} {len(size):7,d}")


def choices(train: dict[str, list[Measured]], which: str) -> None:
    """Score candidates by leaving out train GPUs, and print the best ones: of both kinds, or of one."""
    if which != "memory-bound":
        power_laws(train)
    generator = np.random.default_rng(0)
    for kind, groups in (("memory-bound", GROUPS[:3]), ("products", GROUPS[3:])):
        if which not in ("both", kind):
            continue
        total = np.zeros(len(METRICS))
        for group in groups:
            data = [entry if len(entry) <= _ROWS_FOR_CHOICES else
                    entry.rows(generator.choice(len(entry), _ROWS_FOR_CHOICES, replace=False))
                    for entry in train[group.name]]
            scores = {}
            for name, recipe in recipes(group.family).items():
                recipe = with_envelopes(recipe, group, train)
                runs = [leave_one_out(recipe, METRICS, data, larger=larger) for larger in (False, True)]
                scores[name] = np.array([[np.mean([mape(e) for e in errors]) for errors in run] for run in runs])
                best = int(scores[name].mean(0).argmin())
                print(f"{group.name}, {name}: best weighting alone {scores[name][:, best].round(2)} "
                      f"(GPU left out; and larger sizes too) {METRICS[best]}")
            least = min(scores.values(), key=lambda s: s.mean(0).min())
            total += least.mean(0)
        print(f"One weighting for all {kind} groups, sum of scores:")
        for i in np.argsort(total)[:5]:
            print(f"  {total[i]:7.2f} {METRICS[i]}")


def power_laws(train: dict[str, list[Measured]]) -> None:
    """Score the shapes of the power law by the best rates of left-out GPUs."""
    print("Shapes of the power law: mean error of a left-out GPU's best rates, %")
    rates = joined(train["FC"], train["BMM"])
    for law in LAWS:
        errors = []
        for i, (device, duration, rate) in enumerate(rates):
            other = fit_power_law([entry for j, entry in enumerate(rates) if j != i], law)
            errors.append(mape(np.log(other.tflops(device, duration) / rate)))
        print(f"  beta {law.beta:.1f} static {law.static:.2f}: {np.mean(errors):6.2f}   "
              + "  ".join(f"{entry[0].name} {error:.1f}" for entry, error in zip(rates, errors, strict=True)))


def left_out_table(models: dict[str, tuple[TransferModel, Residuals]]) -> None:
    """Print the error of each train GPU when it is left out, and how much of each the others' intervals hold."""
    print("Train GPUs, each left out of the fit in turn (train rows by size): MAPE, %, and calls in the intervals that "
          "the other GPUs' errors give")
    print(f"  {'':12}{'':8}" + "".join(f"{figures(gpu).name:>15}" for gpu in TRAIN_GPUS) + f"{'mean':>10}{'in 80%':>8}")
    for name, (_, residuals) in models.items():
        for size in Size:
            found = residuals.far[size]
            values = [mape(e) for e in found]
            held = [np.mean(np.abs(e) <= spread(found[:i] + found[i + 1:], elsewhere=True))
                    for i, e in enumerate(found)]
            print(f"  {name:12}{size.value:8}" + "".join(f"{value:15.1f}" for value in values)
                  + f"{np.mean(values):10.1f}{100 * np.mean(held):7.0f}%")


def test_table(models: dict[str, tuple[TransferModel, Residuals]], gpus: Sequence[str]) -> None:
    """Predict the test rows of GPUs and print errors by group and GPU, and over all of these GPUs by group."""
    test = read("test")
    print(f"  {'':12}{'GPU':15}" + " ".join(f"{name:>8}" for name in ("MAPE", "median", "bias", "p90", "max"))
          + f" {'rows':>7} {'in 80%':>7}  limits")
    for group in GROUPS:
        errors, inside = [], []
        for gpu in gpus:
            data = measured(test, group, gpu, distinct=False)
            if not len(data):
                continue
            times = models[group.name][0].on(data.figures).predict_dims(data.dims)
            errors.append(np.log(times.time_us / data.time_us))
            inside.append((times.low_us <= data.time_us) & (data.time_us <= times.high_us))
            limit = TARGET_A100.get(group.name) if "80GB" in gpu and gpus is UNSEEN_GPUS else None
            print(f"  {group.name:12}{data.figures.name:15}{summary(errors[-1])} {100 * inside[-1].mean():6.0f}%"
                  + (f"  {asked(mape(errors[-1]), limit)}" if limit else ""))
        every = np.concatenate(errors)
        print(f"  {group.name:12}{'all':15}{summary(every)} {100 * np.concatenate(inside).mean():6.0f}%"
              + (f"  {asked(mape(every), TARGET[group.name])}; NeuSight {PUBLISHED[group.name]}"
                 if gpus is UNSEEN_GPUS else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--choices", nargs="?", const="both", choices=("both", "memory-bound", "products"),
                        help="score every candidate by leaving out train GPUs, of all groups or of one kind")
    parser.add_argument("--no-test", action="store_true", help="stop before the test rows are read")
    arguments = parser.parse_args()
    table = read("train")
    train = {group.name: [measured(table, group, gpu) for gpu in TRAIN_GPUS] for group in GROUPS}
    if arguments.choices:
        choices(train, arguments.choices)
        return
    print("Every choice was made by leaving out one train GPU (--choices), never on test rows.\n")
    models = fitted(train)
    left_out_table(models)
    if arguments.no_test:
        return
    print("\nTest rows of GPUs never fitted, errors in %")
    test_table(models, UNSEEN_GPUS)
    print("\nTest rows of the train GPUs (their train rows were fitted), errors in %")
    test_table(models, TRAIN_GPUS)


if __name__ == "__main__":
    main()
