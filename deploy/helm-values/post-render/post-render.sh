#!/usr/bin/env bash
# A Helm post-renderer: manifests in on stdin, manifests with the sidecar out on stdout. Works in a directory of its own,
# so that the checkout may be read-only and two may run at once.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/helm-values"
cp -r "$here/../../kustomize" "$work/kustomize"
cp -r "$here" "$work/helm-values/post-render"
cat >"$work/helm-values/post-render/rendered.yaml"
kubectl kustomize "$work/helm-values/post-render"
