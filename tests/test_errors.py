import ast
import pathlib
import re

import nebula_jax

ROOT = pathlib.Path(nebula_jax.__file__).parent
OTHERS = ("--file_format",)  # of another program


def test_errors_of_the_library_name_arguments_and_commands_make_them_flags():
    """`command_line.with_flags` does: other programs have the arguments alone."""
    found = []
    for path in ROOT.rglob("*.py"):
        if "commands" in path.relative_to(ROOT).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Raise) and node.exc is not None:
                texts = re.findall(r"--[a-z]\w+", ast.unparse(node.exc))
                found += [f"{path}:{node.lineno} {text}" for text in texts]
    assert not [each for each in found if not each.endswith(OTHERS)]
