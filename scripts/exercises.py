#!/usr/bin/env python3
"""The learner's loop: ./workbook start, check, hint, solution, reset and progress.

A stage's kernels are the only source. Regions in them, from a line "// exercise 02.1 begin" to "// exercise 02.1 end", are what learners
write. Tasks, hints and what stands in an emptied region are in exercises.md beside the kernels, which also has the faults of the kernels
in which a bug is to be found. The learner's files lie in exercises/, which git ignores.
"""

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

CHECK_SECONDS = 120  # a check takes a few; a loop that does not end would take for ever


class Refused(Exception):
    """Something that cannot be done; the message says what would be accepted."""


class DoesNotCompile(Exception):
    """The learner's file; the message is the compiler's."""


@dataclass
class Task:
    """An exercise, 02.1, or a bug, 02.bug1."""

    id: str
    title: str
    text: str
    hints: list
    stub: str = ""  # what stands in the emptied region
    variant: str = ""  # of the stage, that is checked
    fault: tuple = ()  # of a bug: what is right, and what it is replaced by
    file: str = ""  # the kernel header in which the region is, or the fault

    @property
    def is_bug(self):
        return "bug" in self.id


CODE = re.compile(r"^```cpp\n(.*?)\n```$", re.S | re.M)
BEGIN = re.compile(r"^[ \t]*// exercise (\d\d\.\d+) begin[ \t]*\n", re.M)


def end_of(task_id):
    return re.compile(rf"^[ \t]*// exercise {re.escape(task_id)} end[ \t]*$", re.M)


def regions(text, name):
    """{id: (first, last)}: where the regions of a kernel's text lie, without their markers. `name` is for messages."""
    found = {}
    for begin in BEGIN.finditer(text):
        task_id = begin.group(1)
        end = end_of(task_id).search(text, begin.end())
        following = BEGIN.search(text, begin.end())
        if task_id in found:
            raise Refused(f"{name}: '// exercise {task_id} begin' is there twice; once is accepted")
        if not end or (following and following.start() < end.start()):
            raise Refused(f"{name}: the line '// exercise {task_id} end' is missing after its begin; put it back where the region ends")
        found[task_id] = (begin.end(), end.start())
    return found


def code_of(markdown):
    return CODE.findall(markdown)


def without_markers(text):
    return re.sub(r"^[ \t]*// exercise \d\d\.\d+ (begin|end)[ \t]*\n", "", text, flags=re.M)


def indented(code, indentation):
    """Preprocessor lines stay at the left, as clang-format has them."""
    lines = (line if not line or line.startswith("#") else indentation + line for line in code.splitlines())
    return "".join(line + "\n" for line in lines)


class Stage:
    """The exercises of one stage."""

    def __init__(self, folder):
        self.folder = folder
        self.number = folder.name[:2]
        self.kernels = {path.name: path.read_text("utf-8") for path in sorted(folder.glob("*.cuh"))}
        self.regions = {}  # id: (file, first, last)
        for name, text in self.kernels.items():
            for task_id, (first, last) in regions(text, f"steps/{folder.name}/{name}").items():
                self.regions[task_id] = (name, first, last)
        self.tasks = {task.id: task for task in self.read_tasks()}
        missing = set(self.regions) - set(self.tasks)
        if missing:
            raise Refused(f"steps/{folder.name}/exercises.md has no task for the regions {' '.join(sorted(missing))}")

    def read_tasks(self):
        path = self.folder / "exercises.md"
        if not path.is_file():
            return
        for section in re.split(r"^## ", path.read_text("utf-8"), flags=re.M)[1:]:
            heading, body = section.split("\n", 1)
            match = re.fullmatch(rf"({self.number}\.(?:\d+|bug\d+)) (.*)", heading)
            if not match:
                raise Refused(f"{path}: the heading '## {heading}' is not '## {self.number}.1 Title' or '## {self.number}.bug1 Title'")
            details = re.findall(r"<details><summary>(.*?)</summary>\n(.*?)</details>", body, re.S)
            text = body.split("<details>")[0]
            variant = re.search(r"^Variant `([^`]+)`\.\n", text, re.M)
            task = Task(
                id=match.group(1),
                title=match.group(2),
                text=re.sub(r"\n{3,}", "\n\n", CODE.sub("", text.replace(variant.group(), "") if variant else text)).strip(),
                hints=[content.strip() for summary, content in details if summary.startswith("Hint")],
                variant=variant.group(1) if variant else self.number,
            )
            if task.is_bug:
                code = [block for summary, content in details if summary == "Fault" for block in code_of(content)]
                if len(code) != 2:
                    raise Refused(f"{path}: {task.id} needs '<details><summary>Fault</summary>' with two cpp blocks, the right and the wrong")
                task.fault = tuple(code)
                task.file = self.file_of_fault(task)
            else:
                code = code_of(text)
                if len(code) != 1 or task.id not in self.regions:
                    raise Refused(f"{path}: {task.id} needs one cpp block, and a region in a kernel of this stage")
                task.stub = code[0]
                task.file = self.regions[task.id][0]
            yield task

    def file_of_fault(self, task):
        holds = [name for name, text in self.kernels.items() if without_markers(text).count(task.fault[0]) == 1]
        named = [name for name in holds if f"`{name}`" in task.text]
        holds = named or holds
        if len(holds) != 1:
            raise Refused(f"steps/{self.folder.name}: what {task.id} replaces is in {len(holds)} kernels once; in one, or in one that its text names, "
                          f"is accepted: {task.fault[0]}")
        return holds[0]

    def exercises(self):
        return [task for task in self.tasks.values() if not task.is_bug]

    def solution(self, task_id):
        name, first, last = self.regions[task_id]
        return self.kernels[name][first:last]

    def emptied(self, task_id):
        """What a region holds before the learner begins."""
        first = next(line for line in self.solution(task_id).splitlines() if line and not line.startswith("#"))
        return indented(self.tasks[task_id].stub, re.match(r"[ \t]*", first).group())

    def skeleton(self, name, only=None):
        """A kernel with all its regions emptied, or one alone."""
        text = self.kernels[name]
        for task_id, (first, last) in sorted(regions(text, name).items(), key=lambda item: -item[1][0]):
            if only in (None, task_id):
                text = text[:first] + self.emptied(task_id) + text[last:]
        return text

    def faulty(self, task):
        """A kernel with a fault and without markers, which would narrow the search."""
        return without_markers(self.kernels[task.file]).replace(*task.fault)


class Workbook:
    """The checkout, the learner's folder in it and what is remembered of the learner's progress."""

    def __init__(self, root):
        self.root = Path(root)
        self.learner = self.root / "exercises"
        folders = sorted(path for path in (self.root / "steps").glob("[0-9][0-9]_*") if (path / "exercises.md").is_file())
        self.folders = {path.name[:2]: path for path in folders}
        self.state_file = self.learner / "progress.json"
        self.state = {"done": {}, "hints": {}}
        if self.state_file.is_file():
            try:
                self.state.update(json.loads(self.state_file.read_text("utf-8")))
            except ValueError as error:
                raise Refused(f"{self.shown(self.state_file)} is not JSON ({error}); remove it to begin anew") from None

    def shown(self, path):
        return str(path.relative_to(self.root))

    def save(self):
        self.learner.mkdir(parents=True, exist_ok=True)
        fresh = self.state_file.with_suffix(".new")
        fresh.write_text(json.dumps(self.state, indent=2) + "\n", "utf-8")
        fresh.replace(self.state_file)

    def stage(self, number):
        if number not in self.folders:
            raise Refused(f"stage '{number}' has no exercises; accepted: {' '.join(self.folders)}")
        return Stage(self.folders[number])

    def find(self, word):
        """(stage, task): the task is None where the word names a whole stage."""
        match = re.fullmatch(r"(?:step)?(\d{1,2})(?:_\w+)?(?:\.(\d+|bug\d+))?", word)
        if not match:
            raise Refused(f"'{word}' is no exercise: 02, 02.1 or 02.bug1 are accepted")
        stage = self.stage(match.group(1).zfill(2))
        if not match.group(2):
            return stage, None
        task_id = f"{stage.number}.{match.group(2)}"
        if task_id not in stage.tasks:
            raise Refused(f"exercise '{word}' does not exist; stage {stage.number} has {' '.join(stage.tasks)}")
        return stage, stage.tasks[task_id]

    def files(self, stage, bug):
        """{name: path} of the learner's files: of a bug, or of the stage's exercises."""
        if bug:
            return {bug.file: self.learner / stage.number / bug.id.split(".")[1] / bug.file}
        return {name: self.learner / stage.number / name for name in dict.fromkeys(task.file for task in stage.exercises())}

    def read(self, stage, task):
        """The learner's texts by name; all of them must be there."""
        bug = task if task and task.is_bug else None
        texts = {}
        for name, path in self.files(stage, bug).items():
            if not path.is_file():
                what = bug.id if bug else stage.number
                raise Refused(f"{self.shown(path)} is not there: ./workbook start {what} makes it")
            texts[name] = path.read_text("utf-8")
        if not bug:
            for name, text in texts.items():
                there = regions(text, self.shown(self.files(stage, None)[name]))
                lost = [t.id for t in stage.exercises() if t.file == name and t.id not in there]
                if lost:
                    raise Refused(
                        f"{self.shown(self.files(stage, None)[name])} has no region {lost[0]} any more: the lines '// exercise {lost[0]} "
                        f"begin' and '// exercise {lost[0]} end' show where it is; ./workbook start {stage.number} --again makes a new file"
                    )
        return texts

    def is_begun(self, stage, task, texts):
        first, last = regions(texts[task.file], task.file)[task.id]
        return "".join(texts[task.file][first:last].split()) != "".join(stage.emptied(task.id).split())


def for_terminal(stage, text):
    """Markdown with its links as paths in the checkout."""

    def shown(link):
        path, mark, heading = link.group(2).partition("#")
        return f"{link.group(1)} ({os.path.normpath(f'steps/{stage.folder.name}/{path}')}{mark}{heading})"

    return wrapped(re.sub(r"\[([^\]]+)\]\(([^)]+)\)", shown, text.replace("\n\n", "\0").replace("\n", " ").replace("\0", "\n\n")), "")


def keep_aside(path):
    """Moves a file to the first free name beside it, and returns that."""
    number = 1
    while (aside := path.with_name(f"{path.stem}.old{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)
    return aside


# ---- start, hint, solution, reset, progress ---------------------------------------------------------------------------------


def start(workbook, word, again=False):
    stage, task = workbook.find(word)
    if task and not task.is_bug:
        raise Refused(f"start takes a stage or a bug, but got '{word}': ./workbook start {stage.number} makes the file of all its exercises")
    files = workbook.files(stage, task)
    there = [path for path in files.values() if path.exists()]
    if there and not again:
        raise Refused(f"{workbook.shown(there[0])} is there and stays as it is; --again begins anew and keeps it beside the new one")
    for name, path in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            print(f"{workbook.shown(path)} is kept as {keep_aside(path).name}")
        path.write_text(stage.faulty(task) if task else stage.skeleton(name), "utf-8")
        print(workbook.shown(path))
    print()
    if task:
        print(f"{task.id} {task.title}\n\n{for_terminal(stage, task.text)}\n\nThen: ./workbook check {task.id}")
    else:
        for exercise in stage.exercises():
            print(f"{exercise.id} {exercise.title}  ({exercise.file})")
        print(f"\nFill a region, then: ./workbook check {stage.number}. Hints: ./workbook hint {stage.exercises()[0].id}")
    return 0


def find_one(workbook, command, word):
    stage, task = workbook.find(word)
    if not task:
        raise Refused(f"{command} takes one exercise, but got '{word}'; stage {stage.number} has {' '.join(stage.tasks)}")
    return stage, task


def hint(workbook, word):
    stage, task = find_one(workbook, "hint", word)
    given = workbook.state["hints"].get(task.id, 0)
    if given == 0:
        print(f"{task.id} {task.title}\n\n{for_terminal(stage, task.text)}\n")
    if given < len(task.hints):
        print(for_terminal(stage, f"Hint {given + 1} of {len(task.hints)}: {task.hints[given]}"))
        workbook.state["hints"][task.id] = given + 1
        workbook.save()
    else:
        for number, text in enumerate(task.hints, 1):
            print(for_terminal(stage, f"Hint {number}: {text}") + "\n")
        print(f"There are no more. ./workbook solution {task.id} shows how the stage does it.")
    return 0


def solution(workbook, word):
    stage, task = find_one(workbook, "solution", word)
    source = f"steps/{stage.folder.name}/{task.file}"
    if task.is_bug:
        lines = [without_markers(stage.kernels[task.file]).splitlines(), stage.faulty(task).splitlines()]
        print("\n".join(difflib.unified_diff(lines[1], lines[0], "faulty", source, n=2, lineterm="")))
    else:
        print(f"{source}:\n\n{textwrap.dedent(stage.solution(task.id)).rstrip()}")
    return 0


def reset(workbook, word):
    stage, task = workbook.find(word)
    if not task:
        raise Refused(f"reset takes one exercise, but got '{word}': ./workbook start {stage.number} --again begins the whole stage anew")
    text = workbook.read(stage, task)[task.file]
    path = workbook.files(stage, task if task.is_bug else None)[task.file]
    if task.is_bug:
        fresh = stage.faulty(task)
    else:
        first, last = regions(text, workbook.shown(path))[task.id]
        fresh = text[:first] + stage.emptied(task.id) + text[last:]
    if fresh == text:
        print(f"{task.id} is as it was at the start")
        return 0
    aside = keep_aside(path)
    path.write_text(fresh, "utf-8")
    workbook.state["done"].pop(task.id, None)
    workbook.save()
    print(f"{task.id} is empty again in {workbook.shown(path)}; what was there is in {aside.name}")
    return 0


def progress(workbook):
    done = total = 0
    for number in workbook.folders:
        stage = workbook.stage(number)
        print(f"{stage.folder.name}")
        for task in stage.tasks.values():
            state = "done" if task.id in workbook.state["done"] else ""
            if not state:
                try:
                    texts = workbook.read(stage, task)
                    state = "begun" if task.is_bug or workbook.is_begun(stage, task, texts) else "to do"
                except Refused:
                    state = "-"
            hints = workbook.state["hints"].get(task.id, 0)
            print(f"  {task.id:8} {state:6} {task.title}" + (f"  ({hints} of {len(task.hints)} hints)" if hints else ""))
            done += state == "done"
            total += 1
    print(f"\n{done} of {total} done")
    return 0


# ---- check ------------------------------------------------------------------------------------------------------------------


def composed(stage, text, path, stand_in):
    """The learner's text with the regions `stand_in` as the stage has them; compilers still speak of the learner's lines."""
    name = json.dumps(str(path), ensure_ascii=False)  # a path may hold quotes
    for task_id, (first, last) in sorted(regions(text, path).items(), key=lambda item: -item[1][0]):
        if task_id in stand_in:
            line = text.count("\n", 0, last) + 1
            text = text[:first] + stage.solution(task_id) + f"#line {line} {name}\n" + text[last:]
    return f"#line 1 {name}\n{text}"


def write_if_changed(path, text):
    if not path.is_file() or path.read_text("utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def compile_errors(output, workbook):
    """The first two errors of a build, with the lines that they point at and the learner's that led there; where there is none, its end."""
    lines = output.replace(f"{workbook.root}/", "").splitlines()
    learner = workbook.shown(workbook.learner) + "/"
    errors = [index for index, line in enumerate(lines) if re.search(r": (fatal )?error: ", line)][:2]
    picked = []
    for index in errors:
        picked.append(lines[index])
        picked += [line for line in lines[index + 1 : index + 3] if re.match(r"\s*\d* \|", line)]
        if not lines[index].startswith(learner):
            around = lines[max(0, index - 8) : index + 8]
            picked += [line for line in around if line.startswith(learner) and "required from" in line][:1]
    return "\n".join(picked or lines[-20:])


@dataclass
class Builder:
    folder: Path
    cmake: str
    jobs: int


def build_and_run(workbook, stage, texts, bug, stand_in, variants, builder):
    """Builds the learner's texts, with the regions `stand_in` as the stage has them, and runs the check.
    @return the exit status, and what it says"""
    folder = builder.folder / "steps" / stage.folder.name
    target = f"exercise{stage.number}"
    paths = workbook.files(stage, bug)
    for name, text in stage.kernels.items():
        mine = composed(stage, texts[name], paths[name], stand_in) if name in texts else text
        write_if_changed(folder / "exercise/kernels" / stage.folder.name / name, mine)
    begin = time.monotonic()
    built = subprocess.run(
        [builder.cmake, "--build", str(builder.folder), "--parallel", str(builder.jobs), "--target", target],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if built.returncode != 0:
        raise DoesNotCompile(compile_errors(built.stdout, workbook))
    if time.monotonic() - begin >= 1:
        print(f"built in {time.monotonic() - begin:.0f} s", file=sys.stderr)
    command = [str(folder / target), *variants]
    try:
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired as error:
        before = (error.stdout or b"").decode()
        return 1, f"{before}\nno end after {CHECK_SECONDS} s: does every loop come to its end, for every thread?"
    if ran.returncode < 0:
        return 1, f"{ran.stdout}\nended by signal {-ran.returncode}: is an array in registers, or a local variable, accessed past its end?"
    return ran.returncode, ran.stdout.rstrip()


def wrapped(text, indent="  "):
    options = {"subsequent_indent": indent, "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(textwrap.fill(line, 120, **options) for line in text.split("\n"))


def check_once(workbook, word, builder):
    """Builds and runs the check of a stage's exercises, of one of them, or of a bug. @return the exit status"""
    try:
        return check_regions(workbook, word, builder)
    except DoesNotCompile as error:
        print(f"It does not compile:\n\n{error}")
        return 1


def check_regions(workbook, word, builder):
    stage, task = workbook.find(word)
    texts = workbook.read(stage, task)
    if task and task.is_bug:
        status, told = build_and_run(workbook, stage, texts, task, set(), [task.variant], builder)
        print(wrapped(told))
        note(workbook, [task], status)
        print(f"\n{task.id}: found and mended" if status == 0 else f"\nThe fault is still there. A hint: ./workbook hint {task.id}")
        return status

    name = workbook.shown(workbook.files(stage, None)[task.file if task else stage.exercises()[0].file])
    begun = [exercise for exercise in stage.exercises() if workbook.is_begun(stage, exercise, texts)]
    waiting = [exercise for exercise in stage.exercises() if exercise not in begun]
    if task and task not in begun:
        raise Refused(f"{task.id} is still a TODO in {name}: {task.title}")
    if not begun:
        raise Refused(f"nothing is written yet in {name}: begin with {waiting[0].id}, {waiting[0].title}")

    def run(chosen):
        rest = {exercise.id for exercise in stage.exercises() if exercise not in chosen}
        return build_and_run(workbook, stage, texts, None, rest, list(dict.fromkeys(exercise.variant for exercise in chosen)), builder)

    chosen = [task] if task else begun
    if waiting and not task:
        print(f"still to do, and as the stage has them meanwhile: {' '.join(exercise.id for exercise in waiting)}\n")
    status, told = run(chosen)
    print(wrapped(told), flush=True)
    if status == 0:
        note(workbook, chosen, status)
        print(f"\n{' '.join(exercise.id for exercise in chosen)}: right")
        if waiting and not task:
            print(f"next: {waiting[0].id}, {waiting[0].title}")
        return 0
    # Which region is it? With the stage's lines in all others only one that is wrong by itself still fails.
    for exercise in sorted(chosen, key=lambda exercise: exercise.id in workbook.state["done"]):
        try:
            alone = run([exercise])[0] if len(chosen) > 1 else status
        except DoesNotCompile:  # by itself: it hands on something else than the stage's
            alone = 1
        note(workbook, [exercise], alone)
        if alone != 0:
            print(f"\nLook at {exercise.id} ({exercise.title}). A hint: ./workbook hint {exercise.id}")
            break
    else:
        print("\nEach region is right by itself, with the stage's lines in the others: look at what one hands to the next, and at what was "
              "changed outside of them.")  # fmt: skip
    return status


def note(workbook, tasks, status):
    """Remembers how a check of these together ended."""
    for task in tasks:
        if status == 0:
            workbook.state["done"].setdefault(task.id, time.strftime("%Y-%m-%d %H:%M"))
        else:
            workbook.state["done"].pop(task.id, None)
    workbook.save()


def wait_a_moment():
    time.sleep(0.3)


def check(workbook, word, builder, watch=False):
    if not watch:
        return check_once(workbook, word, builder)
    stage, task = workbook.find(word)
    paths = list(workbook.files(stage, task if task and task.is_bug else None).values())
    workbook.read(stage, task)

    def stamps():
        return [path.stat().st_mtime_ns if path.exists() else 0 for path in paths]

    while True:
        before = stamps()
        print(f"---- {time.strftime('%H:%M:%S')} {word}")
        try:
            check_once(workbook, word, builder)
        except Refused as error:
            print(error)
        print(f"---- waiting for {', '.join(workbook.shown(path) for path in paths)} to be saved; Ctrl-C ends", flush=True)
        while stamps() == before or 0 in stamps():  # an editor may remove the file before it writes it
            wait_a_moment()


# ---- for CMake --------------------------------------------------------------------------------------------------------------


def generate(workbook, folder):
    """Writes into `folder` what the tests compile, a folder of kernels for each: skeletons, single regions emptied, bugs. Prints a line
    for each: kind, name, folder of the step, exercise, variant."""

    def write(kind, name, stage, changed, task_id, variant):
        for file, text in changed.items():
            write_if_changed(folder / name / file, text)
        print(kind, name, stage.folder.name, task_id, variant)

    for number in workbook.folders:
        stage = workbook.stage(number)
        empty = {name: stage.skeleton(name) for name in workbook.files(stage, None)}
        write("SKELETON", f"skeleton_{number}", stage, empty, number, stage.exercises()[0].variant)
        for task in stage.tasks.values():
            kind, text = ("BUG", stage.faulty(task)) if task.is_bug else ("EMPTIED", stage.skeleton(task.file, task.id))
            write(kind, f"{kind.lower()}_{task.id.replace('.', '_')}", stage, {task.file: text}, task.id, task.variant)
    return 0


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Refused(f"{self.prog.split()[-1]}: {message}; ./workbook start --help shows what is accepted")


def main():
    parser = Parser(prog="./workbook", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="of the checkout")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("start")
    one.add_argument("what", metavar="NN")
    one.add_argument("--again", action="store_true")
    one = commands.add_parser("check")
    one.add_argument("what", metavar="NN")
    one.add_argument("--watch", action="store_true")
    one.add_argument("--build", type=Path, required=True)
    one.add_argument("--cmake", default="cmake")
    one.add_argument("--jobs", type=int, default=os.cpu_count())
    for name in ("hint", "solution", "reset"):
        commands.add_parser(name).add_argument("what", metavar="NN.k")
    commands.add_parser("progress")
    commands.add_parser("generate").add_argument("folder", type=Path)
    try:
        arguments = parser.parse_args()
        workbook = Workbook(arguments.root)
        if arguments.command == "start":
            return start(workbook, arguments.what, arguments.again)
        if arguments.command == "check":
            return check(workbook, arguments.what, Builder(arguments.build, arguments.cmake, arguments.jobs), arguments.watch)
        if arguments.command == "progress":
            return progress(workbook)
        if arguments.command == "generate":
            return generate(workbook, arguments.folder)
        return {"hint": hint, "solution": solution, "reset": reset}[arguments.command](workbook, arguments.what)
    except Refused as error:
        print(f"workbook: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as of "| head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
