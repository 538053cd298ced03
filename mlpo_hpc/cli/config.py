"""``mlpo config``: what can be set, and whether a configuration is valid."""

from __future__ import annotations

import json
from typing import Any

import click

from mlpo_hpc.config import SECTION, OffloadConfig
from mlpo_hpc.errors import MlpoError

EXAMPLES = """
\b
Examples:
  mlpo config                            every key, with values, default and meaning
  mlpo config ds_config.json             is it valid, and what does it set?
  MLPO_HPC_HOST_MEMORY=100GB mlpo config ds_config.json
  mlpo config --json > mlpo_offload.schema.json
"""


@click.command(epilog=EXAMPLES)
@click.argument("ds_config", required=False, metavar="[FILE]", type=click.Path(exists=True, dir_okay=False))
@click.option("--markdown", is_flag=True, help="Without FILE: the reference as Markdown (docs/configuration.md).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; without FILE: a JSON schema of the section.")
def config(ds_config: str | None, markdown: bool, as_json: bool) -> None:
    """Tell what can be set in the section "mlp_offload"; with FILE, whether that DeepSpeed configuration is valid.

    FILE is read as training reads it, with the MLPO_HPC_ variables; what it sets beside the defaults is printed. What
    DeepSpeed itself may refuse, and storage, are not looked at: for the latter there is mlpo doctor. Exit code 1 if it
    is not valid.
    """
    if markdown and (ds_config is not None or as_json):
        raise click.UsageError("--markdown takes neither FILE nor --json")
    if ds_config is not None:
        _check(ds_config, as_json)
    elif as_json:
        click.echo(json.dumps(OffloadConfig.model_json_schema(), indent=1))
    else:
        _show(markdown)


def _check(path: str, as_json: bool) -> None:
    from mlpo_hpc.engine.translate import translate

    try:
        found = translate(path).offload.model_dump(mode="json", exclude_defaults=True)
    except MlpoError as error:
        if as_json:
            click.echo(json.dumps({"valid": False, "error": str(error)}, indent=1))
            raise SystemExit(1) from error
        raise click.ClickException(f"{path}: {error}") from error
    _tell(path, {SECTION: found}, as_json)


def _tell(path: str, section: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"valid": True, **section}, indent=1))
        return
    click.echo(f"{path} is valid. Beside the defaults it sets")
    click.echo(json.dumps(section, indent=1))


def _show(markdown: bool) -> None:
    from mlpo_hpc.cli.reference import reference

    if markdown:
        click.echo(reference(), nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console(color_system=None).print(Markdown(reference()))
