"""What the documents show runs in an installed wheel: programs, commands and requests."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from documents import MODEL, ROOT, RUNS, commands_of, python_of

EXAMPLES = ROOT / "examples"
# What stands for what a page leaves to its reader.
PLACES = {
    "MODEL": MODEL,
    "FILE": "made.kvsnap",
    "STORE": "made",
    "A B": "made.kvsnap other.kvsnap",
}
# Pages whose commands run in their order, with models/ of a checkout beside them; and what commands
# exit with, where that is not 0.
COMMANDS = {
    "README.md": {},
    "docs/scaling.md": {"--context 128K": 2},  # of a model that was made for 4,096 tokens
    "docs/exactness.md": {
        "score --model models/tiny-retriever --against rollout.json --threads 1": 1
    },
    "docs/stores.md": {"snapshot diff": 1},
    "docs/how_to/a_bit_that_differs.md": {"snapshot diff": 1},
    "docs/how_to/damaged_snapshot.md": {},
    "docs/how_to/http_server.md": {},
}
PREAMBLE = f"""
import kvpager, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("{MODEL}")
tokenizer = AutoTokenizer.from_pretrained("{MODEL}")
prompt, longer = "A cache keeps", "A cache keeps keys and values"
"""


@pytest.mark.parametrize("page", RUNS)
def test_the_programs_of_a_page_run_and_run_again(installed, tmp_path, page):
    code = python_of(page, installed.cache_argument)
    assert code
    own = "" if "from_pretrained" in code else PREAMBLE
    program = tmp_path / "program.py"
    program.write_text(own + code, encoding="utf-8")
    printed = installed.run("python", str(program), cwd=tmp_path)
    kinds = {masked(line) for line in printed.splitlines()}
    assert {masked(line) for line in figures_of(page)} <= kinds
    installed.run("python", str(program), cwd=tmp_path)  # with what the first run has saved


def figures_of(page: str) -> list[str]:
    """The lines of a page's outputs that have no text of a model."""
    text = (ROOT / page).read_text(encoding="utf-8")
    outputs = "\n".join(re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    return [line for line in outputs.splitlines() if re.search(r"\d tokens (were|came)", line)]


def masked(line: str) -> str:
    """A line without its numbers."""
    return re.sub(r"\d[\d,.]*", "N", line)


@pytest.fixture
def folder(installed, tmp_path):
    """A folder with models/ of a checkout, two snapshots and a store, as pages speak of."""
    (tmp_path / "models").symlink_to(ROOT / "models")
    generate = ["kvpager", "generate", "-q", "--model", MODEL, "--max-new-tokens", "4"]
    for prompt, *places in (
        ("--prompt", "A pool", "--save", "made.kvsnap"),
        ("--prompt", "A store", "--save", "other.kvsnap"),
        ("--prompt", "A chunk", "--save", "turn", "--store", "made"),
        ("--ids", "5,6,7", "--logprobs", "--json", "--output", "rollout.json"),
    ):
        installed.run(*generate, prompt, *places, cwd=tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", COMMANDS)
def test_the_commands_of_a_page_do_what_it_says(installed, folder, page):
    servers = []
    try:
        for line in (filled(line) for block in commands_of(page) for line in block):
            if line.startswith("pip ") or "..." in line:
                continue
            if line.startswith("kvpager serve"):
                stop(servers)
                servers.append(Server(installed, line, folder))
            elif line.startswith("curl "):
                answer = servers[-1].asked(line)
                assert not isinstance(answer, dict) or answer.get("error") is None, line
            else:
                expected = [code for words, code in COMMANDS[page].items() if words in line]
                done = subprocess.run(
                    ["bash", "-c", line], cwd=folder, env=installed.environment,
                    stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
                )  # fmt: skip
                told = f"{line}\n{done.stdout}\n{done.stderr}"
                assert done.returncode == (expected or [0])[0], told
    finally:
        stop(servers)


def filled(line: str) -> str:
    """A command of kvpager with something in each place, and without what may be left out."""
    if not line.startswith("kvpager "):
        return line
    line = re.sub(r" \[[^\]]*\]", "", line)
    for place, value in PLACES.items():
        line = re.sub(rf"(?<![\w-]){place}\b", value, line)
    return line


class Server:
    """A running `kvpager serve`, at a free port."""

    def __init__(self, installed, line: str, folder: Path) -> None:
        self._installed, self._folder = installed, folder
        more = " --port 0 --pool-tokens 4096 --host-bytes 256MiB"
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec {line}{more}"],
            cwd=folder, env=installed.environment, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        said = []
        assert self._process.stderr is not None
        for text in self._process.stderr:  # ends with the process
            said.append(text)
            if found := re.match(r"  saves  (.*)", text):
                self.store = found[1]
                break
            if found := re.match(r"  page   (\S+)/$", text):
                self.url = found[1]
        else:
            pytest.fail(f"{line}\n{''.join(said)}")

    def asked(self, line: str) -> object:
        """The answer to a curl command; JSON is read."""
        line = line.replace("curl ", "curl -sS ", 1).replace("http://127.0.0.1:8000", self.url)
        answer = self._installed.run("bash", "-c", line, cwd=self._folder)
        return json.loads(answer) if answer.startswith("{") else answer

    def stop(self) -> None:
        """Ends it as Ctrl-C would."""
        self._process.terminate()
        self._process.communicate()


def stop(servers: list[Server]) -> None:
    """Ends all of them."""
    while servers:
        servers.pop().stop()


def test_the_folder_that_a_server_names_is_a_store_with_its_conversations(installed, folder):
    server = Server(installed, f"kvpager serve --model {MODEL}", folder)
    body = {"messages": [{"role": "user", "content": "Hello"}], "session_id": "ada"}
    content = "-H 'content-type: application/json'"
    path = "http://127.0.0.1:8000/v1/chat/completions"
    try:
        server.asked(f"curl {path} {content} -d '{json.dumps(body | {'max_tokens': 4})}'")
    finally:
        server.stop()
    assert "ada" in installed.run("kvpager", "snapshot", "ls", server.store, cwd=folder)


@pytest.mark.parametrize("name", ["agent_loop", "own_model", "rag"])
def test_an_example_that_was_copied_runs(installed, tmp_path, name):
    shutil.copy(EXAMPLES / f"{name}.py", tmp_path)
    assert installed.run("python", f"{name}.py", cwd=tmp_path)


NOTEBOOK = EXAMPLES / "first_conversation.ipynb"
EXECUTE = Path(__file__).with_name("execute.py")
# What a reader may add: the messages, and a message that a cell sends twice without a number.
ADDED = """
print(len(session.messages), len(restored.messages))
try:
    restored.chat("Thank you.", max_new_tokens=4)
except kvpager.InvalidArgumentError as error:
    print(error)
"""


@pytest.mark.parametrize("times", [1, 2])
def test_a_notebook_runs_and_a_cell_that_runs_twice_adds_no_turn(installed, tmp_path, times):
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    last = {"cell_type": "code", "id": "added", "metadata": {}, "source": ADDED}
    notebook["cells"].append(last | {"execution_count": None, "outputs": []})
    given, made = tmp_path / "given.ipynb", tmp_path / "made.ipynb"
    given.write_text(json.dumps(notebook), encoding="utf-8")
    installed.run("python", str(EXECUTE), str(given), str(made), str(times), cwd=tmp_path)
    cells = [
        cell
        for cell in json.loads(made.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]
    printed = "".join(cells[-1]["outputs"][0]["text"])
    assert printed.startswith("4 6\n")
    assert "turn=3 to answer again, or turn=4 to add it" in printed
    shown = [
        output["data"].get("text/html")
        for cell in cells[:-1]
        for output in cell["outputs"]
        if output["output_type"] == "execute_result"
    ]
    assert len(shown) == 6 * times
    assert None not in shown
