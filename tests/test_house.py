"""The house keeps its own rules: which way imports go, where flags are read."""

import ast
import pathlib
import re
import tokenize

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LIBRARY = ROOT / "nebula_jax"

# Rows of the house, from the ground up; a row may import itself and what is below.
ROWS = (
    {"disk", "errors", "files", "installed", "printable", "strict_json", "trace"}
    | {"xla_flags"},
    {"security"},
    {"data"},
    {"models", "communication"},
    {"training"},
    {"parallel", "evaluation"},
    {"federation"},
    {"runtime"},
    {"face"},
    {"commands"},
    {"__main__"},
)
"""The packages of the library, from the lowest on; a room within one may lie higher."""
FLAG_MADE = re.compile(r"DEFINE_|fields\.(setting|to_begin_with|of_\w+|for_experts)$")
FLAG_RE = re.compile(r"(?<![\w-])--(?:\[?no\]?)?([a-z]\w+)")
OTHERS_FLAGS = {"ntasks", "rows", "until"}  # of `srun`, and of `nebula grant`
READERS = ("configuration",)
"""Modules of `experiments` that `main` calls to read flags."""
PLACEHOLDERS = {"flag", "name"}


def sources(*folders: str) -> list[pathlib.Path]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(found)


def name_of(path: pathlib.Path) -> str:
    """The dotted name of a module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: pathlib.Path, modules: set[str]) -> set[str]:
    """Modules of the project that a file imports, as it is read."""
    found = set()
    tree = ast.parse(path.read_text())
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules - {name_of(path)}


def graph(*folders: str) -> dict[str, set[str]]:
    paths = sources(*folders)
    modules = {name_of(path) for path in paths}
    return {name_of(path): imported(path, modules) for path in paths}


def row(module: str) -> int:
    _, *room = module.split(".")
    names = {".".join(room[:depth]) for depth in (1, 2)}
    return max(number for number, rooms in enumerate(ROWS) if names & rooms)


def test_imports_of_the_library_go_down_or_stay():
    up = [
        f"{module} imports {other}"
        for module, others in graph("nebula_jax").items()
        for other in others
        if module.count(".") and other.count(".") and row(other) > row(module)
    ]
    assert not up


def test_the_library_imports_no_experiment_and_experiments_no_script():
    everything = graph("nebula_jax", "experiments", "scripts")
    floors = ("nebula_jax", "experiments", "scripts")
    up = [
        f"{module} imports {other}"
        for module, others in everything.items()
        for other in others
        if floors.index(other.split(".")[0]) > floors.index(module.split(".")[0])
    ]
    assert not up


def test_no_import_goes_round():
    everything = graph("nebula_jax", "experiments", "scripts")
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way, module))
        if module not in done:
            for other in everything[module]:
                visit(other, (*way, module))
            done.add(module)

    for module in everything:
        visit(module, ())


def test_experiments_do_not_import_each_others_rooms():
    rooms = {"m3", "abnet", "xnli", "bert"}
    across = [
        f"{module} imports {other}"
        for module, others in graph("experiments").items()
        for other in others
        if {module.split(".")[1], other.split(".")[1]} <= rooms
        and module.split(".")[1] != other.split(".")[1]
    ]
    assert not across


def test_the_library_reads_flags_in_its_commands_alone():
    assert {
        path.relative_to(LIBRARY).parts[0]
        for path in sources("nebula_jax")
        if re.search(r"from absl import .*\b(flags|app)\b", path.read_text())
    } <= {"commands"}


def test_what_is_private_in_jax_is_imported_in_one_file():
    """The next release may have moved it."""
    private = re.compile(r"^ *(import|from) +(jax|flax|optax|orbax)[\w.]*\._\w+", re.M)
    found = {
        str(path.relative_to(ROOT))
        for path in sources("nebula_jax", "experiments", "scripts", "tests")
        if private.search(path.read_text())
    }
    assert found == {"nebula_jax/runtime/ranks/cluster.py"}


def flag_reads(path: pathlib.Path) -> list[str]:
    """Where a file reads or writes flags: `flags.FLAGS` and `SOME_FLAG.value`."""
    found = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        is_flags = isinstance(node, ast.Attribute) and node.attr == "FLAGS"
        is_value = (
            isinstance(node, ast.Attribute)
            and node.attr == "value"
            and isinstance(node.value, ast.Name)
            and node.value.id.isupper()
        )
        if function and (is_value or (is_flags and ast.unparse(node) == "flags.FLAGS")):
            found.append(f"{name_of(path)}.{function}")
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(path.read_text()), "")
    return found


def test_in_experiments_flags_are_read_in_main_alone():
    readers = {
        reader
        for path in sources("experiments")
        if name_of(path).partition(".")[2] not in READERS
        for reader in flag_reads(path)
    }
    assert {reader.rpartition(".")[2] for reader in readers} <= {"main", "from_flags"}


def docstrings(path: pathlib.Path) -> list[str]:
    """Every docstring of a file, attributes' included, and every flag's help."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.append(node.value.value)
        if isinstance(node, ast.Call) and FLAG_MADE.search(ast.unparse(node.func)):
            found += [
                each.value
                for each in node.args[1:]
                if isinstance(each, ast.Constant) and " " in str(each.value)
            ]
    return [text for text in found if isinstance(text, str)]


def remarks(path: pathlib.Path) -> list[str]:
    """Every comment of a file, and every text in a `raise` or a message."""
    with path.open("rb") as stream:
        tokens = list(tokenize.tokenize(stream.readline))
    found = [token.string for token in tokens if token.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(path.read_text())):
        is_message = isinstance(node, ast.Call) and "message" in ast.unparse(node.func)
        if isinstance(node, ast.Raise) or is_message:
            found += [
                each.value
                for each in ast.walk(node)
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            ]
    return found


@pytest.mark.parametrize("folder", ["nebula_jax", "experiments", "scripts"])
def test_docstrings_begin_with_a_verb_or_an_article(folder):
    """A function returns, reads, makes; a class is a thing; a property too, or True."""
    bad = []
    for path in sources(folder):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            text = ast.get_docstring(node) or ""
            is_thing = isinstance(node, ast.ClassDef) or any(
                "property" in ast.unparse(each) for each in node.decorator_list
            )
            start = r"(A|An|The|One|True)\b" if is_thing else r"[A-Z][a-z]+s\b"
            if text and not re.match(start, text):
                bad.append(f"{path.relative_to(ROOT)}: {node.name}: {text[:60]}")
    assert not bad, "\n".join(bad)


def test_functions_fit_a_screen_and_training_loops_too():
    """Sixty lines with docstring; fifty for a `train`, set-up and loop together."""
    long = []
    for path in sources("nebula_jax", "experiments", "scripts"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > (50 if node.name == "train" else 60):
                    long.append(f"{path.relative_to(ROOT)}: {node.name}: {lines}")
    assert not long, "\n".join(long)


def test_no_call_splats_a_group_of_literals():
    """`f(*(a, b), c)` fits a line, and hides which argument is which."""
    splats = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources("nebula_jax", "experiments", "scripts", "tests")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and any(
            isinstance(each, ast.Starred)
            and isinstance(each.value, ast.Tuple | ast.List)
            for each in node.args
        )
    ]
    assert not splats, "\n".join(splats)


def written() -> list[tuple[pathlib.Path, str]]:
    """Everything that a reader reads: guides without their tables, code, flagfiles."""
    paths = [ROOT / "README.md", ROOT / "ARCHITECTURE.md"]
    for folder in ("nebula_jax", "experiments", "scripts"):
        for ending in ("py", "md", "flags", "sh"):
            paths += (ROOT / folder).rglob(f"*.{ending}")
    generated = re.compile(r"<!-- begin (\w+) -->.*?<!-- end \1 -->", re.DOTALL)
    return [(path, generated.sub("", path.read_text())) for path in sorted(paths)]


def defined_flags() -> set[str]:
    """The flags that calls of `DEFINE_...` name, and fields that are flags."""
    found = set()
    for path in sources("nebula_jax/commands", "experiments", "scripts"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(args=[ast.Constant(value=name), *_]) if (
                    "DEFINE_" in ast.unparse(node.func)
                ):
                    found.add(name)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(func=made)):
                    if FLAG_MADE.match(ast.unparse(made)):
                        found.add(name)
    return found


def test_every_flag_in_the_text_is_defined():
    """In code docstrings, comments, help and errors count: it starts other programs."""
    known = (
        defined_flags() | OTHERS_FLAGS | PLACEHOLDERS | {"flagfile", "help", "helpfull"}
    )
    bad = []
    for path, text in written():
        if path.suffix == ".sh":
            continue
        if path.suffix == ".py":
            text = "\n".join([*docstrings(path), *remarks(path)])
        for found in FLAG_RE.finditer(text):
            if not {found[1], found[1].removeprefix("no")} & known:
                bad.append(f"{path.relative_to(ROOT)}: {found[0]}")
    assert not bad, "\n".join(bad)


def test_every_path_and_module_in_the_text_is_there():
    folders = "nebula_jax|experiments|scripts|tests|notebooks"
    quoted = re.compile(rf"(?<![\w/.])(?:{folders})/[\w./-]*\w")
    command = re.compile(r"python -m ((?:experiments|scripts)(?:\.\w+)+)")
    bad = []
    page = ROOT / "SECURITY.md"  # its flags are those of `nebula`, its paths are ours
    for path, text in [*written(), (page, page.read_text())]:
        where = path.relative_to(ROOT)
        for found in quoted.finditer(text):
            if "NAME" not in found[0] and not (ROOT / found[0]).exists():
                bad.append(f"{where}: {found[0]}")
        for found in command.finditer(text):
            if not (ROOT / f"{found[1].replace('.', '/')}.py").is_file():
                bad.append(f"{where}: {found[0]}")
        if path.suffix == ".md":
            for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
                if not (path.parent / link).exists():
                    bad.append(f"{where}: {link}")
    assert not bad, "\n".join(bad)


def test_few_files_remove_anything():
    """What is removed is not lost by accident: each place has its own tests."""
    found = {
        str(path.relative_to(ROOT))
        for path in sources("nebula_jax", "experiments", "scripts")
        if re.search(r"\b(rmtree|unlink|rmdir|os\.remove)\(", path.read_text())
    }
    assert found == {
        "nebula_jax/disk.py",  # for checkpoint_files.py
        "nebula_jax/data/tokenizers/__init__.py",  # in a folder that it writes
        "nebula_jax/models/pretrained/folder.py",  # the same
        "scripts/tables/runs.py",  # a folder that it marked as its own
        "scripts/make_tables.py",  # a picture in place of which there is none
    }
