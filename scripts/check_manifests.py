"""The work of scripts/check-manifests."""

import copy
import json
import pathlib
import subprocess
import sys

import kubernetes_validate
import yaml

# The versions for which outlast is of use begin before native sidecars; those need 1.29.
VERSIONS = ["1.25", "1.33", "1.37"]
NATIVE = ["1.29", "1.33", "1.37"]
# What a strategic merge knows the members of a list by.
KEYS = {"containers": "name", "initContainers": "name", "volumes": "name", "env": "name", "volumeMounts": "mountPath"}

# What an injector makes of a Pod, cut down to what the overlays meet.
INJECTED = """
apiVersion: v1
kind: Pod
metadata:
  name: injected
spec:
  initContainers:
  - name: istio-init
    image: istio/proxyv2:1.27.1
    args: [istio-iptables, -p, "15001"]
  containers:
  - name: shop
    image: registry.example.com/shop:1.0
  - name: istio-proxy
    image: istio/proxyv2:1.27.1
    args: [proxy, sidecar]
    env:
    - {name: ISTIO_META_CLUSTER_ID, value: Kubernetes}
    lifecycle:
      postStart:
        exec:
          command: [pilot-agent, wait]
    volumeMounts:
    - {name: istio-envoy, mountPath: /etc/istio/proxy}
  volumes:
  - {name: istio-envoy, emptyDir: {medium: Memory}}
"""

failed = 0
checked = 0


def fail(what, why):
    global failed
    failed += 1
    print(f"check-manifests: {what}: {why}", file=sys.stderr)


def validate(what, manifest, versions=None):
    global checked
    for version in versions or VERSIONS:
        checked += 1
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            fail(f"{what}, Kubernetes {version}", f"{'.'.join(map(str, error.path))}: {error.message}")


def merge(base, patch, key=None):
    """Lays patch over base as the injector does."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{k: merge(base.get(k), v, k) for k, v in patch.items()}}
    if isinstance(base, list) and isinstance(patch, list) and key in KEYS:
        by = KEYS[key]
        merged = {item[by]: item for item in base}
        for item in patch:
            merged[item[by]] = merge(merged.get(item[by]), item)
        return list(merged.values())
    return patch


def container(pod, name):
    return next(c for c in pod["spec"]["containers"] if c["name"] == name)


def rendered(what, template):
    """The Pod that an injection template makes; ours have no actions, so what is rendered is the text itself."""
    if "{{" in template:
        fail(what, "has actions, which this check cannot render")
    pod = merge(yaml.safe_load(INJECTED), yaml.safe_load(template))
    validate(f"{what}, rendered", pod)
    proxy = container(pod, "istio-proxy")
    if proxy["lifecycle"]["postStart"]["exec"]["command"][1:] != ["poststart"]:
        fail(what, "does not repeat what its postStart hook displaces")
    if proxy["image"] != "istio/proxyv2:1.27.1" or len(pod["spec"]["containers"]) != 2:
        fail(what, "does not leave the injected containers as they are")
    commands(what, pod["spec"])


def commands(what, spec):
    """Whatever runs outlast has the volume that it was installed on."""
    for one in spec.get("containers", []):
        mounts = [mount["mountPath"] for mount in one.get("volumeMounts", [])]
        hooks = [hook["exec"]["command"] for hook in one.get("lifecycle", {}).values() if "exec" in hook]
        for command in [*hooks, one.get("command", [])]:
            if command and command[0].endswith("/outlast") and command[0].rpartition("/")[0] not in mounts:
                fail(what, f"{one['name']} runs {command[0]}, and has no such volume")


def settings(what, env):
    """outlast itself says what is wrong with a setting, and names a variable that it does not know."""
    env = {k: v for k, v in env.items() if k.startswith("OUTLAST_")}
    for name, value in env.items():
        if not isinstance(value, str):
            fail(what, f"{name} is {value!r} and no string: it needs quotes")
            return
    if not env:
        return
    job = "OUTLAST_QUIT" in env
    argv = ["app", "--disable", "--", "true"] if job else ["poststart", "--ready-timeout=0", "--on-timeout=continue"]
    ran = subprocess.run([outlast, *argv], env={"PATH": "/usr/bin:/bin", **env}, capture_output=True, text=True, check=False)
    said = [line for line in ran.stderr.splitlines() if "OUTLAST_" in line]
    if ran.returncode != 0 or said:
        fail(what, f"{env}: exit {ran.returncode}: {' '.join(said) or ran.stderr}")


def proxy_metadata(what, config):
    settings(what, (config or {}).get("proxyMetadata") or {})


def values(what, tree):
    """Helm values, and those of an IstioOperator."""
    proxy_metadata(what, tree.get("meshConfig", {}).get("defaultConfig"))
    for name, template in tree.get("sidecarInjectorWebhook", {}).get("templates", {}).items():
        rendered(f"{what}: {name}", template)


def container_patch(what, patch):
    """Kuma's: JSON patches of the sidecar, of which ours only add."""
    sidecar = {"name": "kuma-sidecar", "image": "kumahq/kuma-dp:2.11.0", "env": []}
    for operation in patch["spec"]["sidecarPatch"]:
        if (operation["op"], operation["path"]) != ("add", "/env/-"):
            fail(what, f"{operation['op']} {operation['path']} is not known to this check")
            continue
        sidecar["env"].append(json.loads(operation["value"]))
    pod = copy.deepcopy(yaml.safe_load(INJECTED))
    pod["spec"]["containers"].append(sidecar)
    validate(f"{what}, rendered", pod)
    settings(what, {one["name"]: one["value"] for one in sidecar["env"]})


def envoy_config(what, text):
    """Envoy itself says what is wrong with its configuration."""
    envoy = pathlib.Path("target/tools/envoy")
    if not envoy.exists():
        print(f"check-manifests: {what}: not checked without Envoy, which scripts/setup-tests fetches")
        return
    argv = [envoy, "--mode", "validate", "--log-level", "critical", "--config-yaml", text]
    ran = subprocess.run(argv, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        fail(what, ran.stderr)


def workload(what, manifest):
    if "envoy.yaml" in manifest.get("data", {}):
        envoy_config(what, manifest["data"]["envoy.yaml"])
    validate(what, manifest, NATIVE if what.startswith("deploy/native") else None)
    if "template" not in manifest.get("spec", {}):
        return
    template = manifest["spec"]["template"]
    commands(what, template["spec"])
    grace = f"{template['spec'].get('terminationGracePeriodSeconds', 30)}s"
    environments = [{e["name"]: e.get("value", "") for e in c.get("env", [])} for c in template["spec"]["containers"]]
    config = yaml.safe_load(template["metadata"].get("annotations", {}).get("proxy.istio.io/config", "{}"))
    environments.append(config.get("proxyMetadata") or {})
    for env in environments:
        settings(what, env)
        if env.get("OUTLAST_GRACE_PERIOD", grace) != grace:
            fail(what, f"OUTLAST_GRACE_PERIOD is not the Pod's {grace}")


outlast = str(pathlib.Path(sys.argv[1]).resolve())
files = sorted(pathlib.Path(sys.argv[2]).rglob("*.yaml"))
for file in files:
    for document in yaml.safe_load_all(file.read_text()):
        kind = document.get("kind")
        if kind is None:
            values(str(file), document)
        elif kind == "IstioOperator":
            values(str(file), document["spec"].get("values", {}))
            proxy_metadata(str(file), document["spec"].get("meshConfig", {}).get("defaultConfig"))
        elif kind == "ContainerPatch":
            container_patch(str(file), document)
        else:
            workload(str(file), document)
if not files or not checked:
    fail("deploy", "nothing was checked")
print(f"check-manifests: {len(files)} files, {checked} validations, {failed} failures")
sys.exit(1 if failed else 0)
