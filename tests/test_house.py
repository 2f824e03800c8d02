"""The house keeps its own rules: which way imports go, where flags are read."""

import ast
import functools
import pathlib
import re
import tokenize

ROOT = pathlib.Path(__file__).parents[1]
LIBRARY = ROOT / "nebula_jax"
FLOORS = ("nebula_jax", "experiments", "scripts")
"""Folders of code; what is in one imports nothing of those behind it."""

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
# Of `srun`, of `jupyter execute`, and of `nebula grant`.
OTHERS_FLAGS = {"ntasks", "output", "rows", "until"}
OTHERS_FLAGS |= {"unsent"}  # withdrawn; its record's page has it
READERS = ("configuration",)  # modules of experiments that `main` calls to read flags
PLACEHOLDERS = {"flag", "name"}


def sources(*folders: str) -> list[pathlib.Path]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(found)


def name_of(path: pathlib.Path) -> str:
    """The dotted name of a module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache  # to parse every file takes most of the time of these tests
def nodes(path: pathlib.Path) -> list[ast.AST]:
    """Every node of a file's tree, the module itself first."""
    return list(ast.walk(ast.parse(path.read_text("utf-8"))))


def called(node: ast.Call) -> str:
    """The name of the function that is called, such as `flags.DEFINE_list`."""
    parts, function = [], node.func
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    parts.append(function.id if isinstance(function, ast.Name) else "")
    return ".".join(reversed(parts))


def imported(path: pathlib.Path, modules: set[str]) -> set[str]:
    """Modules of the project that a file imports, as it is read."""
    module, *_ = every = nodes(path)
    for_types = {
        inner
        for node in module.body
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in every:
        if node in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules - {name_of(path)}


@functools.cache
def graph() -> dict[str, set[str]]:
    """Module -> the modules of the project that it imports."""
    paths = {name_of(path): path for path in sources(*FLOORS)}
    return {name: imported(path, set(paths)) for name, path in paths.items()}


def imports() -> list[tuple[str, str]]:
    return [(module, other) for module, others in graph().items() for other in others]


def row(module: str) -> int:
    _, *room = module.split(".")
    names = {".".join(room[:depth]) for depth in (1, 2)}
    return max(number for number, rooms in enumerate(ROWS) if names & rooms)


def test_imports_of_the_library_go_down_or_stay():
    up = [
        f"{module} imports {other}"
        for module, other in imports()
        if module.startswith("nebula_jax.") and other.startswith("nebula_jax.")
        if row(other) > row(module)
    ]
    assert not up


def test_the_library_imports_no_experiment_and_experiments_no_script():
    up = [
        f"{module} imports {other}"
        for module, other in imports()
        if FLOORS.index(other.split(".")[0]) > FLOORS.index(module.split(".")[0])
    ]
    assert not up


def test_no_import_goes_round():
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way, module))
        if module not in done:
            for other in graph()[module]:
                visit(other, (*way, module))
            done.add(module)

    for module in graph():
        visit(module, ())


def test_experiments_do_not_import_each_others_rooms():
    rooms = {f"experiments.{name}" for name in ("m3", "abnet", "xnli", "bert")}

    def room(module: str) -> str:
        return ".".join(module.split(".")[:2])

    across = [
        f"{module} imports {other}"
        for module, other in imports()
        if {room(module), room(other)} <= rooms and room(module) != room(other)
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
        for path in sources(*FLOORS, "tests")
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

    visit(nodes(path)[0], "")
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
    for node in nodes(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.append(node.value.value)
        if isinstance(node, ast.Call) and FLAG_MADE.search(called(node)):
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
    for node in nodes(path):
        is_message = isinstance(node, ast.Call) and "message" in called(node)
        if isinstance(node, ast.Raise) or is_message:
            found += [
                each.value
                for each in ast.walk(node)
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            ]
    return found


def test_errors_of_the_library_name_arguments_and_commands_make_them_flags():
    """`command_line.with_flags` does: other programs have the arguments alone."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {text}"
        for path in sources("nebula_jax")
        if path.parent != LIBRARY / "commands"
        for node in nodes(path)
        if isinstance(node, ast.Raise) and node.exc is not None
        for text in re.findall(r"--[a-z]\w+", ast.unparse(node.exc))
        if text != "--file_format"  # of another program
    ]
    assert not found


def test_docstrings_begin_with_a_verb_or_an_article():
    """A function returns, reads, makes; a class is a thing; a property too, or True."""
    bad = []
    for path in sources(*FLOORS):
        for node in nodes(path):
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
    for path in sources(*FLOORS):
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > (50 if node.name == "train" else 60):
                    long.append(f"{path.relative_to(ROOT)}: {node.name}: {lines}")
    assert not long, "\n".join(long)


def test_no_call_splats_a_group_of_literals():
    """`f(*(a, b), c)` fits a line, and hides which argument is which."""
    splats = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources(*FLOORS, "tests")
        for node in nodes(path)
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
    for folder in FLOORS:
        for ending in ("py", "md", "flags", "sh"):
            paths += (ROOT / folder).rglob(f"*.{ending}")
    generated = re.compile(r"<!-- begin (\w+) -->.*?<!-- end \1 -->", re.DOTALL)
    return [(path, generated.sub("", path.read_text())) for path in sorted(paths)]


def defined_flags() -> set[str]:
    """The flags that calls of `DEFINE_...` name, and fields that are flags."""
    found = set()
    for path in sources("nebula_jax/commands", "experiments", "scripts"):
        for node in nodes(path):
            match node:
                case ast.Call(args=[ast.Constant(value=name), *_]):
                    if "DEFINE_" in called(node):
                        found.add(name)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.Call() as made):
                    if FLAG_MADE.match(called(made)):
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
        for path in sources(*FLOORS)
        if re.search(r"\b(rmtree|unlink|rmdir|os\.remove)\(", path.read_text())
    }
    assert found == {
        "nebula_jax/disk.py",  # for checkpoint_files.py
        "nebula_jax/data/tokenizers/__init__.py",  # in a folder that it writes
        "nebula_jax/models/pretrained/folder.py",  # the same
        "nebula_jax/runtime/records/run_folder.py",  # a lock, in a folder of nothing
        "scripts/tables/runs.py",  # a folder that it marked as its own
        "scripts/make_tables.py",  # a picture in place of which there is none
    }


def test_the_pages_that_are_read_first_stay_short():
    sizes = {"ARCHITECTURE.md": 20_000, "SECURITY.md": 14_000}  # bytes
    assert [name for name in sizes if (ROOT / name).stat().st_size > sizes[name]] == []
