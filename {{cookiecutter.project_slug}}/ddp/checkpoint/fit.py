"""Whether a checkpoint fits a run: how they differ, as texts for the user."""

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ddp.core.errors import differences
from ddp.core.options import REMOVED, flag_of
from ddp.core.run_config import ELASTIC_VARIABLE, RunConfig


def scale_change(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """What another number of processes changes. The arguments are those of run_differences."""
    rates = [facts["parts"].get("schedule", {}).get("peak_lr") for facts in (ours, theirs)]
    pairs = {"global batch": (ours["global_batch"], theirs["global_batch"]), "learning rate": rates}
    known = {name: (now, before) for name, (now, before) in pairs.items() if None not in (now, before)}
    return ", ".join(
        f"the {name} was {before:.9g}, is {now:.9g}" if now != before else f"the {name} is still {now:.9g}"
        for name, (now, before) in known.items()
    )


def run_differences(config: RunConfig, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """How a checkpoint differs from this run, as texts for the user: options, data, parts, names and sizes of weights.

    Both mappings hold the facts of a checkpoint, and `parts`: states by name. An evaluation may have other options.
    """
    options = [] if config.evaluate else [item.name for item in fields(config) if not item.metadata["may_change"]]
    found = []
    # They may be unknown. An evaluation of other samples is fine, but not of other classes.
    labels, their_labels = (facts.get("dataset", {}).get("classes") for facts in (ours, theirs))
    if labels and their_labels:
        if len(labels) != len(their_labels):
            found.append(f"the data had {len(their_labels):,} classes, have {len(labels):,}")
        else:
            pairs = enumerate(zip(labels, their_labels, strict=True))
            found += [f"class {number} of the data was {b}, is {a}" for number, (a, b) in pairs if a != b]
    if not config.evaluate:
        if theirs["samples"] != ours["samples"]:
            found.append(f"training samples were {theirs['samples']:,}, are {ours['samples']:,}")
        sampler, before = (facts.get("dataset", {}).get("sampler", "Shuffled") for facts in (ours, theirs))
        if sampler != before:
            found.append(f"the sampler was {before}, is {sampler}")
        if theirs["global_batch"] != ours["global_batch"]:  # they may change while the global batch stays the same
            chosen = ELASTIC_VARIABLE in os.environ and theirs["world_size"] != ours["world_size"]
            options += ["batch_size"] if chosen else ["batch_size", "grad_accum_steps"]
    models = [name for name in ours["parts"] if name in theirs["parts"] and name not in ours["classes"]]

    def outline(facts: Mapping[str, Any]) -> dict[str, Any]:
        values = {**vars(type(config)()), **facts["config"]}  # the default of one that a checkpoint does not know
        lines = {flag_of(name): values[name] for name in options}
        for name, (default, instead) in REMOVED.items() if not config.evaluate else ():
            lines[f"{flag_of(name)} ({instead})"] = values.get(name, default)
        if not config.evaluate:
            lines["--strict-resume: the number of processes"] = config.strict_resume and facts["world_size"]
        for name in facts["parts"]:
            lines[f"the {name}"] = None if config.evaluate else facts["classes"].get(name)
        for name in models:
            prefix = "" if name == "model" else f"{name}."
            for key, value in facts["parts"][name].items():  # not all are tensors: a module may have an extra state
                lines[prefix + key] = list(getattr(value, "shape", ()))
        return lines

    texts = "{name} was {second}, is {first}", "{name} is not in the checkpoint", "{name} is in the checkpoint only"
    return found + differences(outline(ours), outline(theirs), *texts)
