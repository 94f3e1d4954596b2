"""Tells what a test runner ran and what passed, beside a key used once. PYTEST_DONT_REWRITE

The environment puts this file before everything else on the path of a test's Python, as `sitecustomize`: it is loaded
before any of the repository's code, with the standard library's `unittest` and the installed `pytest`, so that modules
of these names in the repository come too late. What it sees goes to a keeper, an audit hook: nothing in the process
refers to it, so the key is in no closure, frame or module that the repository's code can look into. Standard library
only, Python 3.6 or newer; before 3.8 there are no audit hooks, and the keeper is called directly.

What the keeper is sent, each by this file's own code:

    began, ended       a runner's run; the outermost one counts, and only the frame that began it ends it
    ready              nothing of the repository is loaded yet
    collecting, listed the tests that the run will have, with their code
    started, finished  a test
    entered, left      a part of it (set up, call, tear down); a part that an exception leaves is never `left`
    reported           pytest's word on a part
    skipped            tests that unittest skipped or expected to fail

In the untouched repository (`SKYRL_MEGA_WITNESS=untouched`) a runner goes on after what fails, and its command too, so
that every test that is skipped there comes to be known.
"""

import base64
import builtins
import contextlib
import gc
import os
import re
import sys
import unittest
import zlib

EVENT = "skyrl_mega.witness"
RUNNERS = re.compile(
    r"(unittest(?!\.mock)|pluggy)(\..*)?|pytest|contextlib|builtins|_frozen_importlib(_external)?"
    r"|_pytest\.(_code|assertion|main|nodes|outcomes|python|python_api|raises|reports|runner|skipping|unittest)(\..*)?"
)
"""The modules that outcomes hang on; installed plug-ins replace parts of others."""
FREE = ("open", "input", "print", "__import__", "breakpoint", "exit", "quit", "addSubTest", "addSkip")
"""Names in them that tests and plug-ins replace."""
HOOKS = ["pyfunc_call"]
HOOKS += ["runtest_" + name for name in ("protocol", "setup", "call", "teardown", "makereport", "logreport")]
__unittest = True  # its frames are left out of a failure's traceback


def _keeper(key, out, own, depth):
    """The hook that keeps what was seen, and tells it when the outermost run has ended.

    It uses nothing that is looked up where the repository's code could change it.

    Args:
        key: What shows that a line is from here.
        out: A descriptor of the command's output.
        own: The code that may send something.
        depth: How many frames above the keeper the sender is.
    """
    frame, pid, getpid, identity = sys._getframe, os.getpid(), os.getpid, id
    frozen = getattr(gc, "get_freeze_count", lambda: 1)
    event_name, watch, tell = EVENT, _watch, _tell
    looks = {"gc.get_objects", "gc.get_referrers", "gc.get_referents"}
    bodies, phases = {"__code__", "__defaults__", "__kwdefaults__"}, {"setup", "call", "teardown"}
    runs, tests, codes, functions = [], [], {}, set()  # type: ignore[var-annotated]  # Python 3.6
    clean, skipped = set(), set()
    empty: frozenset = frozenset()
    reports: dict = {}
    state: dict = {"changed": False, "apart": False, "intact": None, "hooks": None, "impls": None}

    def keeper(event, given):
        if event == event_name:
            sender = frame(depth)
            if sender.f_code in own:
                see(sender, *given)
        elif event == "object.__setattr__":
            if given[1] in bodies and identity(given[0]) in functions:
                state["changed"] = True
        elif event in looks and not frozen():
            nonlocal key
            key = ""  # who looks at every object is not shown it

    def see(sender, what, name=None, value=None):
        if what == "began":
            runs.append(sender)
            if not runs[1:]:
                refresh()
                tell(out, key, f"began {pid}")
        elif what == "ended":
            if runs and runs.pop() is sender and not runs and getpid() == pid:
                end()
        elif runs and not runs[1:]:  # not of a run within the run
            (test if what in ("started", "finished", "entered", "left") else session)(sender, what, name, value)

    def session(sender, what, name, value):
        if what == "ready":
            check(None)
            refresh()
        elif what == "collecting" and state["hooks"] is None:
            state["hooks"], state["impls"], state["apart"] = name, name(), value
        elif what == "listed":
            codes.update(name)
            hooks = state["hooks"] and state["hooks"]()
            check(hooks, loading=True)
            state["impls"] = hooks
            refresh()
        elif what == "skipped":
            skipped.update(name)
        elif what == "reported":
            phase, word = value
            seen = empty if phase == "setup" else reports.get(name, empty)
            reports[name] = seen | {phase if word == "passed" else word}
            if word == "rerun" and tests and tests[-1][1] == name:
                tests[-1][2][:] = [None]  # what it does from now on counts

    def test(sender, what, name, code):
        if code is not None and codes.get(name, code) != code:
            state["changed"] = True
        if what == "started":
            clean.discard(name)
            parts = tests[-1][2] if tests and tests[-1][1] == name else [None]  # pytest's item and its TestCase are one
            tests.append((sender, name, parts))
        elif tests and what == "entered":
            tests[-1][2].append(sender)
        elif tests and what == "left" and tests[-1][2][-1] is sender:
            check(state["hooks"] and state["hooks"]())
            tests[-1][2].pop()
            tests[-1][2][0] = "a part"
        elif tests and what == "finished" and tests[-1][0] is sender:
            parts = tests.pop()[2]
            if not tests:
                check(state["hooks"] and state["hooks"](), whole=True)
            if parts == ["a part"]:
                clean.add(name)

    def check(hooks, whole=False, loading=False):
        if not state["intact"](whole, loading):
            state["changed"] = True
        if hooks:
            (impls, calls), (had, called) = hooks, state["impls"]
            lost = [impl for impl in had if impl not in impls and not loading]
            added = [impl for impl in impls if impl not in had]
            if calls != called or lost or [i for i in added if not i.__code__.co_filename.endswith("conftest.py")]:
                state["changed"] = True

    def refresh():
        state["intact"], found = watch()
        functions.update(found)

    def end():
        if not state["hooks"]:  # a session of pytest's that has ended is made of something else
            check(None, whole=True)
        right = {name for name in codes if state["apart"] or name in clean}
        if state["hooks"]:
            right = {name for name in right if reports.get(name) == phases}
        word = "changed" if state["changed"] else "intact"
        left = {name for name in codes if name not in right}
        left = {name for name in left if name in skipped or "skipped" in reports.get(name, empty)}
        tell(out, key, "passed", sorted(right))
        tell(out, key, "skipped", sorted(left))
        tell(out, key, f"ended {pid} {len(codes)} {word}")

    return keeper


def _tell(out, key, line, names=(), *, write=os.write, pack=zlib.compress, text=base64.b64encode):
    packed = text(pack("\n".join(names).encode("utf-8", "replace"))).decode() if names else ""
    for start in range(0, len(packed), 3000):  # one write of less than 4096 bytes is in one piece
        write(out, f"\nproof {key} {line} {packed[start : start + 3000]}\n".encode())
    if not names:
        write(out, f"\nproof {key} {line}\n".encode())


def _watch():
    """A function that tells whether the runners are made of what they are made of now, and the functions in them.

    The builtins are looked at where it is asked for the `whole`: a test may replace them until it is torn down. While
    tests are `loading`, a `conftest.py`, which is the task's own, may replace functions.
    """
    modules = {name: module for name, module in sys.modules.items() if RUNNERS.fullmatch(name)}
    bound, seen = (staticmethod, classmethod, property), set()
    places: list = [(sys.modules, modules, 0, ())]  # namespace, what it must have, its size, names that are not to come

    def add(namespace, hidden):
        made_of = {n: v for n, v in namespace.items() if n not in FREE and (callable(v) or isinstance(v, bound))}
        places.append((namespace, made_of, len(namespace), frozenset(hidden) - frozenset(namespace) - frozenset(FREE)))
        for value in made_of.values():
            if isinstance(value, type) and id(value) not in seen and RUNNERS.fullmatch(value.__module__):
                seen.add(id(value))
                add(value.__dict__, {"__getattr__", *(name for base in value.__mro__[1:] for name in vars(base))})
            _functions(value, seen)

    for module in modules.values():
        add(vars(module), vars(builtins))

    shared, function = vars(builtins), type(_functions)

    def intact(whole, loading, len=len, type=type):
        for namespace, made_of, size, hidden in places:
            get = namespace.get
            for name, value in made_of.items():
                now = get(name)
                if now is value or (namespace is shared and not whole):
                    continue
                if not loading or type(now) is not function or not now.__code__.co_filename.endswith("conftest.py"):
                    return False
            if hidden and len(namespace) != size and not hidden.isdisjoint(namespace):
                return False
        return True

    return intact, seen


def _functions(value, seen):
    """Adds a function, and those that it wraps."""
    value = getattr(value, "__func__", value)
    if not isinstance(value, type(_functions)) or id(value) in seen:
        return
    seen.add(id(value))
    for cell in value.__closure__ or ():
        with contextlib.suppress(ValueError):  # a cell without content
            _functions(cell.cell_contents, seen)


def _outermost(original, send):
    """For `TestProgram.__init__`, which ends with `sys.exit`."""

    def run(*args, **kwargs):
        send(EVENT, "began")
        try:
            return original(*args, **kwargs)
        finally:
            send(EVENT, "ended")

    return run


def _unittest(send, untouched):
    program, case, outcome = unittest.TestProgram, unittest.TestCase, vars(unittest.case)["_Outcome"]
    run_tests, run, execute = program.runTests, case.run, outcome.testPartExecutor

    def listing(self):
        listed = dict(_leaves(self.test))
        send(EVENT, "listed", listed)
        if untouched:
            self.failfast = False
        try:
            return run_tests(self)
        except SystemExit:
            if not untouched:
                raise
            sys.exit(0)
        finally:
            send(EVENT, "skipped", _skipped(self, listed))

    def running(self, result=None):
        name = getattr(result, "nodeid", None) or self.id()
        made_of = (lambda: _of_item(result)) if hasattr(result, "nodeid") else (lambda: _of_test(self))
        send(EVENT, "started", name, made_of())
        try:
            return run(self, result)
        finally:
            send(EVENT, "finished", name, made_of())

    @contextlib.contextmanager
    def executing(self, *args, **kwargs):
        send(EVENT, "entered")
        with execute(self, *args, **kwargs):
            yield
            send(EVENT, "left")

    program.__init__ = _outermost(program.__init__, send)  # type: ignore[method-assign]  # that is what they are for
    program.runTests, case.run = listing, running  # type: ignore[method-assign]
    outcome.testPartExecutor = executing
    return [program.__init__, listing, running, vars(executing)["__wrapped__"]]


def _leaves(suite):
    if isinstance(suite, unittest.TestCase):
        yield suite.id(), _of_test(suite)
    else:
        for inner in suite:
            yield from _leaves(inner)


def _skipped(program, listed):
    """The tests that were skipped, each or with their class or module, and those that were expected to fail."""
    result = getattr(program, "result", None)
    told = [test for kind in ("skipped", "expectedFailures") for test, _ in getattr(result, kind, ())]
    names = [getattr(test, "test_case", test).id() for test in told]
    groups = tuple(match.group(1) + "." for match in map(re.compile(r"setUp\w+ \((.*)\)").fullmatch, names) if match)
    return {*names, *(name for name in listed if name.startswith(groups))}


def _of_test(test):
    """What a test is made of: its code, and what its class has in place of a TestCase's own."""
    code = getattr(getattr(type(test), test._testMethodName, None), "__code__", None)
    return [id(code), *_own(type(test))]


def _of_item(item):
    code = getattr(getattr(item, "function", None), "__code__", None)
    return [id(code), id(type(item)), "runtest" in vars(item), *_own(getattr(item, "cls", None) or object)]


def _own(cls):
    names = {name for name, value in vars(unittest.TestCase).items() if callable(value)}
    return [(name, id(value)) for base in cls.__mro__[:-1] for name, value in vars(base).items() if name in names]


def _pytest(pytest, send, untouched):
    def hook(wrapper=True, **order):
        return pytest.hookimpl(hookwrapper=wrapper, **order)

    class Plugin:
        """What pytest tells; the wrappers of a part are the innermost."""

        @hook(tryfirst=True)
        def pytest_load_initial_conftests(self):
            send(EVENT, "ready")
            yield

        @hook(tryfirst=True)
        def pytest_collection(self, session):
            if untouched:
                session.config.option.continue_on_collection_errors, session.config.option.maxfail = True, 0
            apart = session.config.pluginmanager.hasplugin("dsession")  # xdist: the tests are run in other processes
            manager, names = session.config.pluginmanager, [f"pytest_{name}" for name in HOOKS]

            def hooks(getattr=getattr, id=id, map=map):
                callers = [getattr(session.config.hook, name) for name in names]
                impls = [impl.function for caller in callers for impl in caller.get_hookimpls()]
                return impls, [id(getattr(manager, "_inner_hookexec", None)), *map(id, callers)]

            send(EVENT, "collecting", hooks, apart)
            yield

        @hook(wrapper=False, trylast=True)
        def pytest_collection_finish(self, session):
            codes = {item.nodeid: _of_item(item) for item in session.items}
            send(EVENT, "listed", codes)

        @hook(wrapper=False, optionalhook=True)
        def pytest_xdist_node_collection_finished(self, ids):
            send(EVENT, "listed", dict.fromkeys(ids))

        @hook(tryfirst=True)
        def pytest_runtest_protocol(self, item):
            send(EVENT, "started", item.nodeid, _of_item(item))
            yield
            send(EVENT, "finished", item.nodeid)  # installed plug-ins wrap its function meanwhile

        @hook(trylast=True)
        def pytest_runtest_call(self):
            send(EVENT, "entered")
            outcome = yield
            if outcome.excinfo is None:
                send(EVENT, "left")

        pytest_runtest_setup = pytest_runtest_teardown = pytest_runtest_call

        @hook(wrapper=False, tryfirst=True)
        def pytest_runtest_logreport(self, report):
            word = "skipped" if hasattr(report, "wasxfail") else report.outcome
            send(EVENT, "reported", report.nodeid, (report.when, word))

    config = sys.modules["_pytest.config"]
    entry = "_main" if hasattr(config, "_main") else "main"  # the innermost one that has the whole run
    original = getattr(config, entry)

    def with_plugin(args=None, plugins=None, **more):
        code = original(args=args, plugins=[*(plugins or ()), Plugin()], **more)
        return 0 if untouched else code

    run = _outermost(with_plugin, send)
    setattr(config, entry, run)
    pytest.main = config.main
    return [run, *(value for value in vars(Plugin).values() if hasattr(value, "__code__"))]


def _begin(untouched):
    try:
        key = os.pread(8, 4096, 0).decode()
        out = os.dup(9)  # stdout of the whole command, whatever becomes of this process's own
    except (OSError, ValueError):  # a Python that another started: it has neither
        return
    os.close(8)
    os.close(9)
    own: set = set()
    keepers: list = []
    send = getattr(sys, "audit", None) or (lambda event, *given: keepers[0](event, given))
    functions = _unittest(send, untouched)
    with contextlib.suppress(ImportError):
        import pytest

        functions += _pytest(pytest, send, untouched)
    own.update(function.__code__ for function in functions)
    if hasattr(sys, "addaudithook"):
        sys.addaudithook(_keeper(key, out, own, 1))
    else:
        keepers.append(_keeper(key, out, own, 2))
    getattr(gc, "freeze", int)()  # the keeper is not among gc.get_objects()


_asked = os.environ.pop("SKYRL_MEGA_WITNESS", "")
if _asked:
    _begin(_asked == "untouched")
