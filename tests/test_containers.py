"""launch/kubernetes.yaml, Dockerfile and .dockerignore, on a machine that has neither a cluster nor Docker.

Pods are network namespaces, in which the manifest's own command runs as process 1; a stub takes the place of training.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainingRuntime, TrainerV1alpha1TrainJob
from template_copy import TEMPLATE

from ddp.core.files import hash_source_files
from machines import Machine, Program
from test_nodes import FOR_EVER, assert_nothing_left, project, two  # noqa: F401  # fixtures

SERVICE, JOB = yaml.safe_load_all((TEMPLATE / "launch" / "kubernetes.yaml").read_text())
NAME = JOB["metadata"]["name"]
POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
ENVIRONMENT = {variable["name"]: variable["value"] for variable in CONTAINER["env"]}
SCRIPT = CONTAINER["args"][0]

# ---- the manifest ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
def test_the_manifest_keeps_to_the_schema_of_kubernetes(version: str) -> None:
    for resource in (SERVICE, JOB):
        kubernetes_validate.validate(resource, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**JOB, "spec": {**JOB["spec"], "podFailurePolicies": {}}}, version, strict=True)


def test_pod_0_has_the_name_that_all_pods_are_told() -> None:
    assert SERVICE["spec"]["selector"] == {"batch.kubernetes.io/job-name": NAME}
    assert SERVICE["spec"]["clusterIP"] == "None" and SERVICE["spec"]["publishNotReadyAddresses"]
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    assert ENVIRONMENT["MASTER_ADDR"] == f"{NAME}-0.{POD['subdomain']}"


def test_the_numbers_of_machines_and_of_gpus_agree() -> None:
    spec, resources = JOB["spec"], CONTAINER["resources"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(ENVIRONMENT["NNODES"]) > 1
    assert resources["limits"]["nvidia.com/gpu"] == int(ENVIRONMENT["NPROC_PER_NODE"])
    shared = next(volume["emptyDir"] for volume in POD["volumes"] if "emptyDir" in volume)
    assert shared["medium"] == "Memory" and int(shared["sizeLimit"][:-2]) < int(resources["limits"]["memory"][:-2])


def test_every_volume_is_mounted_and_holds_what_the_run_reads_and_writes() -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert sorted(mounts) == sorted(volume["name"] for volume in POD["volumes"]) and mounts["shm"] == "/dev/shm"
    folders = re.findall(r"--(?:data|output)-dir (\S+)", SCRIPT)
    assert len(folders) == 2 and all(folder.startswith(mounts["storage"] + "/") for folder in folders)
    assert folders[1].endswith(f"/{NAME}"), "another run writes to another folder"


def test_nothing_runs_as_root() -> None:
    context, (image_uid,) = POD["securityContext"], re.findall(r"^ARG UID=(\d+)$", dockerfile_text(), re.MULTILINE)
    assert context["runAsNonRoot"] and not CONTAINER["securityContext"]["allowPrivilegeEscalation"]
    assert context["runAsUser"] == context["runAsGroup"] == context["fsGroup"] == int(image_uid) > 0


DISRUPTED = {"type": "DisruptionTarget", "status": "True"}


def action(exit_code: int, *conditions: dict[str, str]) -> str:
    """What Kubernetes does about a pod that has failed: the first rule that fits; Count if none does."""
    for rule in JOB["spec"]["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes and codes["containerName"] == CONTAINER["name"] and exit_code in codes["values"]:
            return rule["action"]
        if any(pattern in conditions for pattern in rule.get("onPodConditions", [])):
            return rule["action"]
    return "Count"


def test_each_exit_code_is_treated_as_the_launcher_treats_it() -> None:
    assert {code: action(code) for code in range(1, 9)} == {**dict.fromkeys(range(1, 8), "FailJob"), 8: "Count"}
    assert action(75) == "Ignore", "stopped and saved: no limit, since a drained machine stops all pods each time"
    assert [action(128 + number) for number in (signal.SIGKILL, signal.SIGTERM)] == ["Count", "Count"]
    assert action(127) == action(126) == "FailJob", "no such program in the image"


def test_a_pod_whose_machine_was_taken_away_always_comes_again() -> None:
    assert {action(code, DISRUPTED) for code in (*range(1, 9), 75, 137, 143)} == {"Ignore"}
    assert action(3, {"type": "Ready", "status": "False"}) == "FailJob"


def test_the_failure_policy_is_one_that_the_api_server_takes() -> None:
    """What its validation asks for beyond the schema."""
    assert POD["restartPolicy"] == "Never" and JOB["spec"].get("podReplacementPolicy", "Failed") == "Failed"
    for rule in JOB["spec"]["podFailurePolicy"]["rules"]:
        assert rule["action"] in ("Ignore", "FailJob", "Count") and len(rule) == 2
        codes = rule.get("onExitCodes", {"operator": "In", "values": [1]})
        assert codes["operator"] == "In" and 0 not in codes["values"]
        assert codes["values"] == sorted(set(codes["values"]))
    assert JOB["spec"]["backoffLimitPerIndex"] > 0 <= JOB["spec"]["maxFailedIndexes"] < JOB["spec"]["completions"]
    assert JOB["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


def test_the_command_is_clean_bash_that_kubernetes_leaves_as_it_is() -> None:
    assert CONTAINER["command"] == ["bash", "-euc"] and len(CONTAINER["args"]) == 1
    assert "$(" not in SCRIPT and "$$" not in SCRIPT, "Kubernetes would replace it"
    checked = subprocess.run(["shellcheck", "--shell=bash", "-"], input=SCRIPT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


# ---- with Kubeflow Trainer ------------------------------------------------------------------------------------------

RUNTIME, TRAIN_JOB = yaml.safe_load_all((TEMPLATE / "launch" / "trainjob.yaml").read_text())
(NODE,) = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
TRAINER = TRAIN_JOB["spec"]["trainer"]


def test_the_train_job_keeps_to_the_schema_of_kubeflow_trainer() -> None:
    for resource, kind in ((RUNTIME, TrainerV1alpha1TrainingRuntime), (TRAIN_JOB, TrainerV1alpha1TrainJob)):
        known = kind.from_dict(resource)
        assert known is not None and known.to_dict() == resource, "what the schema does not know is dropped"
    with pytest.raises(ValueError, match="numNodes"):
        TrainerV1alpha1TrainJob.from_dict({"spec": {**TRAIN_JOB["spec"], "trainer": {"numNodes": "two"}}})
    wrong = {**TRAIN_JOB, "spec": {**TRAIN_JOB["spec"], "runtimeReference": {}}}
    assert TrainerV1alpha1TrainJob.from_dict(wrong).to_dict() != wrong
    pods = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": NODE["template"]["spec"]}
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    container |= {"image": TRAINER["image"]}
    kubernetes_validate.validate(pods, kubernetes_validate.latest_version(), strict=True)


def test_the_train_job_does_what_the_job_does() -> None:
    assert TRAIN_JOB["spec"]["runtimeRef"] == {
        "apiGroup": RUNTIME["apiVersion"].partition("/")[0],
        "kind": RUNTIME["kind"],
        "name": RUNTIME["metadata"]["name"],
    }
    assert NODE["name"] == NODE["template"]["spec"]["template"]["spec"]["containers"][0]["name"] == "node"
    assert NODE["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job, pod = NODE["template"]["spec"], NODE["template"]["spec"]["template"]["spec"]
    rules = yaml.safe_load(
        yaml.safe_dump(job["podFailurePolicy"]).replace("containerName: node", "containerName: main")
    )
    assert rules == JOB["spec"]["podFailurePolicy"]
    for name in ("backoffLimitPerIndex", "maxFailedIndexes", "completionMode"):
        assert job[name] == JOB["spec"][name]
    names = ("restartPolicy", "terminationGracePeriodSeconds", "securityContext", "volumes", "enableServiceLinks")
    assert all(pod[name] == POD[name] for name in names)
    (container,) = pod["containers"]
    assert all(container[name] == CONTAINER[name] for name in ("securityContext", "volumeMounts"))
    assert TRAINER["resourcesPerNode"] == CONTAINER["resources"] and TRAINER["image"] == CONTAINER["image"]
    assert TRAINER["numNodes"] == RUNTIME["spec"]["mlPolicy"]["numNodes"] == JOB["spec"]["completions"]
    environment = {variable["name"]: variable["value"] for variable in TRAINER["env"]}
    assert environment == {name: value for name, value in ENVIRONMENT.items() if name not in ("NNODES", "MASTER_ADDR")}
    ours, theirs = ((text.splitlines()) for text in (TRAINER["args"][0], SCRIPT))
    assert "PET_NNODES" in ours[1] and "PET_MASTER_ADDR" in ours[1] and "JOB_COMPLETION_INDEX" in ours[1]
    assert ours[:1] + ours[2:] == theirs[:1] + theirs[2:], "all but the line with its variables"
    checked = subprocess.run(
        ["shellcheck", "--shell=bash", "-"], input=TRAINER["args"][0], capture_output=True, text=True
    )
    assert checked.returncode == 0 and "$(" not in TRAINER["args"][0], checked.stdout


# ---- its command, in pods that are namespaces -----------------------------------------------------------------------


def pod(machine: Machine, index: int, project: Path, do: str = "", **environ: str) -> Program:  # noqa: F811
    """A pod of the Job: the manifest's command as process 1, its environment, and what Kubernetes adds to that."""
    name, home = f"{NAME}-{index}", f"{machine.address} {NAME}-{index}.{POD['subdomain']}.default.svc.cluster.local"
    hosts_of(machine).write_text(f"127.0.0.1 localhost\n{home} {name}\n")
    variables = {**ENVIRONMENT, "JOB_COMPLETION_INDEX": str(index), "HOSTNAME": name, "NPROC_PER_NODE": "1", **environ}
    variables |= {"STUB": str(project.parent), "DO": do, "TMPDIR": str(project.parent / "temporary")}
    (project.parent / "temporary").mkdir(exist_ok=True)
    start = ["sh", "-c", 'hostname "$0" && cd "$1" && shift && exec "$@"', name, project]
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return machine.start(*start, *unshare, *CONTAINER["command"], *CONTAINER["args"], **variables)


def hosts_of(machine: Machine) -> Path:
    return Path("/etc/netns") / machine.namespace / "hosts"


def publish(machine: Machine, address: str) -> None:
    """Let this machine find pod 0 at an address, as cluster DNS does."""
    with hosts_of(machine).open("a") as file:
        file.write(f"{address} {ENVIRONMENT['MASTER_ADDR']}\n")


def process_1(pod: Program) -> str:
    """The pod's first process, once there is one."""
    pid, end = pod.process.pid, time.monotonic() + 180
    while time.monotonic() < end:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with suppress(OSError):  # before, the shell has others
                if Path(f"/proc/{child}/comm").read_text() == "bash\n":
                    return child
    raise TimeoutError(pod.output())


def terminate(pod: Program) -> None:
    """SIGTERM to the pod's process 1, as the kubelet sends it."""
    subprocess.run(["kill", "-TERM", process_1(pod)], check=True)


@pytest.mark.slow
def test_pods_meet_although_names_come_late_and_save_when_they_are_terminated(
    two: list[Machine],  # noqa: F811
    project: Path,  # noqa: F811
) -> None:
    later = pod(two[1], 1, project, FOR_EVER)
    later.until(f"node 1: waiting for pod 0, up to {ENVIRONMENT['START_GRACE']} s")
    first = pod(two[0], 0, project, FOR_EVER)
    publish(two[0], "10.77.0.9")  # of the pod 0 that this one replaces
    publish(two[1], two[0].address)
    for rank, program in enumerate((first, later)):
        program.until(f"rank {rank} of 2, turn 1")
    for program in (first, later):
        terminate(program)
    assert [program.wait() for program in (first, later)] == [75, 75], first.output() + later.output()
    assert "rank 0 has saved" in first.output() and "rank 1 has saved" in later.output()
    assert_nothing_left(project)


@pytest.mark.slow
def test_a_pod_that_waits_in_vain_for_the_name_says_so_and_stops_when_asked(
    two: list[Machine],  # noqa: F811
    project: Path,  # noqa: F811
) -> None:
    in_vain = pod(two[0], 1, project, START_GRACE="1")
    asked = pod(two[1], 1, project)
    asked.until("waiting for pod 0")
    terminate(asked)
    assert asked.wait() == 75, asked.output()
    assert in_vain.wait() == 3 and "cannot find its address" in in_vain.output(), in_vain.output()


@pytest.mark.slow
def test_a_pod_that_is_terminated_while_it_starts_ends(
    two: list[Machine],  # noqa: F811
    project: Path,  # noqa: F811
) -> None:
    """The kernel drops a signal for which the first process of a container has no handler yet."""
    for delay in (0.05, 0.2, 0.4, 0.8):
        starting = pod(two[0], 0, project, FOR_EVER, NNODES="1", MASTER_ADDR="127.0.0.1")
        process_1(starting)
        time.sleep(delay)
        terminate(starting)
        assert starting.wait() in (75, 143), starting.output()
    assert_nothing_left(project)


# ---- the image ------------------------------------------------------------------------------------------------------


def dockerfile_text() -> str:
    return (TEMPLATE / "Dockerfile").read_text()


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: `RUN`, `COPY` and so on, each with the rest of its lines."""
    lines = [line for line in dockerfile_text().splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "")
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in joined.splitlines()]


def test_the_linter_finds_nothing_in_the_dockerfile() -> None:
    linted = subprocess.run(["hadolint", "--strict-labels", TEMPLATE / "Dockerfile"], capture_output=True, text=True)
    assert linted.returncode == 0 and not linted.stdout, linted.stdout


def test_the_image_starts_the_launcher_without_a_shell_as_a_user_that_is_not_root() -> None:
    last = dict(instructions())  # of each kind
    assert last["ENTRYPOINT"] == '["./launch_node.sh"]' and "CMD" not in last
    assert (TEMPLATE / "launch_node.sh").stat().st_mode & 0o111
    assert last["USER"] == "${UID}:${UID}" and "PYTHONUNBUFFERED=1" in last["ENV"]
    version = re.search(r"pytorch/pytorch:(\d+)\.(\d+)\.\d+-cuda[\d.]+-cudnn\d+-runtime$", dockerfile_text(), re.M)
    assert version and (int(version[1]), int(version[2])) >= (2, 9), "as pyproject.toml asks for"


def test_editing_the_code_installs_nothing_again() -> None:
    steps = [f"{kind} {rest.split()[-2]}" if kind == "COPY" else kind for kind, rest in instructions()]
    assert [step for step in steps if step.startswith("COPY")] == ["COPY pyproject.toml", "COPY ."]
    assert (TEMPLATE / "pyproject.toml").exists() and "ADD" not in steps
    assert steps.index("COPY pyproject.toml") < steps.index("RUN") and "RUN" not in steps[steps.index("COPY .") :]


def install(folder: Path, more: str = "") -> subprocess.CompletedProcess[str]:
    """The Dockerfile's first RUN, but for the installation itself, in a project that needs more packages than ours.

    pip is offered what is installed here, and torch 99.
    """
    folder.mkdir()
    text = (TEMPLATE / "pyproject.toml").read_text()
    assert text.count("dependencies = [\n") == 1
    (folder / "pyproject.toml").write_text(text.replace("dependencies = [\n", f"dependencies = [\n{more}"))
    for name in ("torch", "torchvision"):
        with zipfile.ZipFile(folder / f"{name}-99-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}-99.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 99\n")
            wheel.writestr(f"{name}-99.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    command = next(rest for kind, rest in instructions() if kind == "RUN")
    assert command.count("pip install") == 1 and "--no-cache-dir" in command
    command = command.replace("/tmp/", f"{folder}/").replace("python3", sys.executable)
    command = command.replace("pip install", f"pip install --dry-run --no-index --find-links {folder}")
    return subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="the image's Python is newer")
def test_the_image_gets_what_pyproject_toml_asks_for_and_keeps_its_torch(tmp_path: Path) -> None:
    done = install(tmp_path / "ours")
    assert done.returncode == 0 and "Would install" not in done.stdout, done.stderr
    (needed,) = re.findall(r"^dependencies = \[\n(.*?)^\]$", (TEMPLATE / "pyproject.toml").read_text(), re.M | re.S)
    asked = re.findall(r"already satisfied: (\S+) in .*\(from -r", done.stdout)
    assert set(re.findall(r'"([^"]+)"', needed)) <= set(asked), done.stdout
    other = install(tmp_path / "other", '"torch>=50",')
    assert other.returncode != 0 and "conflicting dependencies" in other.stderr, other.stdout


# ---- what is copied into it -----------------------------------------------------------------------------------------


def ignored(path: str) -> bool:
    """Whether .dockerignore leaves out a file: as Docker does, by the last pattern that fits it or a folder above."""
    lines = (TEMPLATE / ".dockerignore").read_text().splitlines()
    out = False
    for line in (line.strip() for line in lines):
        if not line or line.startswith("#"):
            continue
        pattern = re.escape(line.removeprefix("!").strip("/"))
        pattern = pattern.replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*").replace(r"\*", "[^/]*")
        if re.fullmatch(f"{pattern}(?:/.*)?", path):
            out = not line.startswith("!")
    return out


def test_the_image_holds_all_that_a_run_needs_and_starts_with_that_alone(tmp_path: Path) -> None:
    code = [name.removeprefix("the file ") for name in hash_source_files(TEMPLATE)]
    assert "ddp/launcher/launch_node.py" in code and not [name for name in [*code, "pyproject.toml"] if ignored(name)]
    for name in code:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TEMPLATE / name, tmp_path / name)
    command = ["bash", tmp_path / "launch_node.sh", "--nnodes", "2", "--master-addr", "pod.invalid"]
    started = subprocess.run(command, capture_output=True, text=True)
    assert started.returncode == 3 and "pod.invalid" in started.stderr, started.stderr  # it looks that up last


NOT_IN_THE_IMAGE = """
    data/cifar-10-batches-py/batches.meta runs/cifar10-ToyModel/best.pt .git/config .github/workflows/ci.yml .env
    .venv/bin/python venv/bin/python build/lib/main.py my_project.egg-info/PKG-INFO __pycache__/main.cpython-312.pyc
    ddp/__pycache__/x.pyc .ruff_cache/x ddp/.mypy_cache/x tests/test_project.py Dockerfile launch/kubernetes.yaml
    README.md AGENTS.md docs/data.md
"""


@pytest.mark.parametrize("path", NOT_IN_THE_IMAGE.split())
def test_the_image_holds_no_data_no_runs_and_no_tools(path: str) -> None:
    assert ignored(path)
