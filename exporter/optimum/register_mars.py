"""`optimum-cli export mars`: the command `mars-export onnx` with all its options, under optimum's name.

The wheel puts this file into the namespace package `optimum.commands.register`. Optimum imports every file of
it at each start, so nothing heavy is imported before the command runs. As in optimum's other exports, the
checkpoint may be given as --model, and the output as the last argument.
"""

from __future__ import annotations

from argparse import REMAINDER, ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand


class MarsExportCommand(BaseOptimumCLICommand):  # type: ignore[misc]
    """Passes its arguments on: mars-export's parser reads them and answers --help."""

    COMMAND = CommandInfo(
        name="mars", help="Export a MARS checkpoint (several tokens a forward) to a mars-export bundle."
    )

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.prefix_chars = "\0"  # so that argparse takes no argument as an option
        parser.add_argument("arguments", nargs=REMAINDER)

    def run(self) -> None:
        import sys
        from inspect import Parameter, signature
        from pathlib import Path
        from typing import Annotated, Any

        import typer

        from mars_export.cli import check_installed
        from mars_export.exporter.commands import onnx as export
        from mars_export.runtime.errors import MarsError
        from mars_export.runtime.terminal.console import print_error

        def export_mars(checkpoint: str | None, **options: Any) -> None:
            model, directory = options.pop("model"), options.pop("directory")
            if model is not None:  # the first argument is the output, as in optimum's other exports
                checkpoint, directory = model, directory or checkpoint
            output = {} if directory is None else {"output": Path(directory)}
            export(checkpoint=checkpoint, **options | output)

        output_argument = Annotated[
            str | None, typer.Argument(metavar="[OUTPUT]", help="The same as --output.")
        ]
        model_option = Annotated[
            str | None, typer.Option("--model", "-m", metavar="CHECKPOINT", help="The same as CHECKPOINT.")
        ]
        ours = signature(export, eval_str=True)
        parameters = [
            *ours.parameters.values(),
            Parameter("directory", Parameter.KEYWORD_ONLY, default=None, annotation=output_argument),
            Parameter("model", Parameter.KEYWORD_ONLY, default=None, annotation=model_option),
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
            sys.exit(error.exit_code)


REGISTER_COMMANDS = [(MarsExportCommand, ExportCommand)]
