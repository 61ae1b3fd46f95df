"""`optimum-cli export mars`: mars-export's `onnx` for people who know optimum, with the same options.

optimum imports every file of its namespace package `optimum.commands.register`, which is where the wheel puts
this one, whenever it starts: nothing heavy is imported before the command runs. Knows no option by name but
the two that optimum's other exports have, --model and a last argument for the output.
"""

from __future__ import annotations

from argparse import REMAINDER, ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand


class MarsExportCommand(BaseOptimumCLICommand):  # type: ignore[misc]
    """Hands its arguments on as they are: mars-export's own parser reads them and answers --help."""

    COMMAND = CommandInfo(
        name="mars", help="Export a MARS checkpoint (several tokens a forward) to a mars-export bundle."
    )

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.prefix_chars = "\0"  # nothing is an option here
        parser.add_argument("arguments", nargs=REMAINDER)

    def run(self) -> None:
        import sys
        from inspect import Parameter, signature
        from pathlib import Path
        from typing import Annotated, Any

        import typer

        from mars_export.cli import check_installed
        from mars_export.exporter.commands import onnx as export
        from mars_export.runtime.cli.console import print_error
        from mars_export.runtime.errors import MarsError

        def export_mars(checkpoint: str | None, **options: Any) -> None:
            model, directory = options.pop("model"), options.pop("directory")
            if model is not None:  # then a first argument is the output, as in optimum's other exports
                checkpoint, directory = model, directory or checkpoint
            export(checkpoint, **options | ({} if directory is None else {"output": Path(directory)}))

        output = Annotated[str | None, typer.Argument(metavar="[OUTPUT]", help="The same as --output.")]
        source = Annotated[
            str | None, typer.Option("--model", "-m", metavar="CHECKPOINT", help="The same as CHECKPOINT.")
        ]
        ours = signature(export, eval_str=True)
        parameters = [
            *ours.parameters.values(),
            Parameter("directory", Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=output),
            Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=source),
        ]
        vars(export_mars)["__signature__"] = ours.replace(parameters=parameters)
        export_mars.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        export_mars.__doc__ = export.__doc__
        app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich", add_completion=False)
        app.command()(export_mars)
        try:
            check_installed("onnx")
            app(self.args.arguments, prog_name="optimum-cli export mars")
        except MarsError as error:
            print_error(error)
            sys.exit(1)


REGISTER_COMMANDS = [(MarsExportCommand, ExportCommand)]
