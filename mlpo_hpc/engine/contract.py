"""The contract with DeepSpeed: refuse a release whose optimizer step has another shape.

We override methods that `DeepSpeedZeroOptimizer_Stage3.step` calls once for each subgroup, and
give their index another meaning (a position in our order). That is right only as long as `step`
uses the index for nothing else, so its source is looked at before any training.
"""

from __future__ import annotations

import ast
import inspect
import os
import textwrap

from mlpo_hpc.errors import UnsupportedError

OLDEST_TESTED = "0.19.5"
NEWEST_TESTED = "0.19.8"
OVERRIDE_VARIABLE = "MLPO_HPC_IGNORE_CONTRACT"

# Called in this order for each subgroup, with the loop index as first argument.
STEP_HOOKS = (
    "_prepare_sub_group",
    "unscale_and_clip_grads",
    "_optimizer_step",
    "_reassign_or_swap_out_partitioned_parameters",
    "_release_sub_group",
)

# Other methods we override or call, with the arguments we count on.
METHODS = {
    "_configure_offloading": ("offload_optimizer_config", "offload_param_config"),
    "_create_fp32_partitions": (),
    "initialize_optimizer_states": (),
    "_swappable_optimizer_subgroup": ("sub_group_id",),
    "_optimizer_states_and_gradient_swap_in": ("sub_group_id", "timer_names"),
    "_optimizer_states_and_gradient_swap_out": ("sub_group_id", "timer_names"),
    "_release_swap_buffers": ("sub_group_id",),
    "_writeback_swap_state": ("sub_group_id", "write_opt_state", "write_gradients"),
    "_get_fp32_opt_state_partition": ("param", "release_swap_buffers", "optim_state_key"),
    "_get_fp32_grad_state_partition": ("param", "release_swap_buffers"),
    "_offload_grad_partition_at_boundary": ("param", "grad_buffer"),
    "partition_grads": ("params_to_release", "grad_partitions"),
    "complete_grad_norm_calculation_for_cpu_offload": ("params",),
    "_unflatten_partitioned_parameters": ("sub_group_id",),
    "_pre_step": (),
    "_post_step": ("timer_names",),
    "_rigid_state_dict": (),
    "_rigid_load_state_dict": ("state_dict", "load_optimizer_states"),
    "_restore_from_bit16_weights": (),
    "_set_fp32_optimizer_param_groups": (),
    "_clear_fp32_optimizer_param_groups": (),
    "backward_prologue": (),
    "backward_epilogue": (),
    "destroy": (),
}


def check(stage3_class: type, version: str) -> None:
    """Raise `UnsupportedError` if this DeepSpeed's ZeRO-3 optimizer is not what we build on.

    Parameters
    ----------
    stage3_class : type
        ``DeepSpeedZeroOptimizer_Stage3``.
    version : str
        DeepSpeed's version, for the message.
    """
    # The source, not the class: DeepSpeed's decorators hide the signatures.
    tree = ast.parse(textwrap.dedent(inspect.getsource(stage3_class))).body[0]
    assert isinstance(tree, ast.ClassDef)
    methods = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    faults = [*_missing_methods(methods), *_step_faults(methods["step"])]
    if faults and os.environ.get(OVERRIDE_VARIABLE) != "1":
        raise UnsupportedError(
            f"DeepSpeed {version} does not have the shape this engine builds on ({'; '.join(faults)}). "
            f"Tested releases: {OLDEST_TESTED} to {NEWEST_TESTED}. Install one of them, or set "
            f"{OVERRIDE_VARIABLE}=1 to try at your own risk."
        )


def _missing_methods(methods: dict[str, ast.FunctionDef]) -> list[str]:
    faults = []
    for name, arguments in METHODS.items():
        if name not in methods:
            faults.append(f"no method {name}")
            continue
        found = tuple(argument.arg for argument in methods[name].args.args)[1 : 1 + len(arguments)]
        if found != arguments:
            faults.append(f"{name} takes {found} instead of {arguments}")
    return faults


def _step_faults(step: ast.FunctionDef) -> list[str]:
    loops = [node for node in ast.walk(step) if isinstance(node, ast.For) and _over_subgroups(node)]
    if len(loops) != 1:
        return [f"step() has {len(loops)} loops over subgroups instead of one"]
    loop = loops[0]
    index = ast.unparse(loop.target).strip("()").split(",")[0]
    calls = [statement for statement in loop.body if not _is_muon(statement)]
    names = [_hook_called_with(statement, index) for statement in calls]
    if tuple(names) != STEP_HOOKS:
        return [f"step() calls {names} for each subgroup instead of {list(STEP_HOOKS)}"]
    uses = sum(isinstance(node, ast.Name) and node.id == index for call in calls for node in ast.walk(call))
    return [] if uses == len(STEP_HOOKS) else ["step() uses the subgroup index for something else"]


def _over_subgroups(loop: ast.For) -> bool:
    return ast.unparse(loop.iter) == "enumerate(self.fp16_groups)"


def _is_muon(statement: ast.stmt) -> bool:
    """Muon's correction sits in the loop; the engine refuses Muon."""
    return isinstance(statement, ast.If) and "muon" in ast.unparse(statement.test)


def _hook_called_with(statement: ast.stmt, index: str) -> str:
    """Name of the method that a statement ``self.name(index, ...)`` calls."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return ast.unparse(statement)
    call = statement.value
    first = call.args[0] if call.args else None
    direct = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
    if direct and isinstance(first, ast.Name) and first.id == index:
        assert isinstance(call.func, ast.Attribute)
        return call.func.attr
    return ast.unparse(statement)
