#!/usr/bin/env bash
# A Helm post-renderer: manifests in on stdin, manifests with the sidecar out on stdout.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
trap 'rm -f "$here/rendered.yaml"' EXIT
cat >"$here/rendered.yaml"
kubectl kustomize "$here"
