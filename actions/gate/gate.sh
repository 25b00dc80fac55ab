#!/usr/bin/env bash
# Runs foretrace check, and gives its verdict to the job's summary, its outputs and the pull request.
# What to check is in GATE_WHAT, GATE_BASE, GATE_AGAINST and GATE_ARGUMENTS; see action.yml.
set -uo pipefail

marker='<!-- foretrace gate -->'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
report=$folder/report.md

# What a pull request may have named is no option: --help would end with 0, as a gate that has passed does.
for named in "${GATE_WHAT:?name captures or a script in GATE_WHAT}" "${GATE_BASE:-}" "${GATE_AGAINST:-}"; do
  case $named in
    -*) printf 'foretrace gate: %s is an option, not a path or a commit; write a path as ./%s\n' "$named" "$named" >&2
        [ -z "${GITHUB_OUTPUT:-}" ] || printf 'verdict=refused\n' >> "$GITHUB_OUTPUT"
        exit 2 ;;
  esac
done
command=(foretrace check "$GATE_WHAT" --markdown "$report")
[ -z "${GATE_BASE:-}" ] || command+=(--base "$GATE_BASE")
[ -z "${GATE_AGAINST:-}" ] || command+=(--against "$GATE_AGAINST")
# Options are split at blanks, as a shell would; nothing in them is run.
read -r -a more <<< "${GATE_ARGUMENTS:-}"
command+=(${more[@]+"${more[@]}"})

"${command[@]}" 2> >(tee "$folder/errors" >&2)
code=$?
case $code in
  0) verdict=passed
     # A check that passed has written its report; --help among the arguments has not.
     [ -s "$report" ] || { code=2; verdict=refused; } ;;
  1) verdict=failed ;;
  3) verdict=inconclusive ;;
  *) verdict=refused ;;
esac
if [ ! -s "$report" ]; then
  { printf '**foretrace check could not tell** (exit code %s)\n\n```\n' "$code"; tail -c 2000 "$folder/errors"; printf '```\n'; } > "$report"
fi

[ -z "${GITHUB_STEP_SUMMARY:-}" ] || cat "$report" >> "$GITHUB_STEP_SUMMARY"
[ -z "${GITHUB_OUTPUT:-}" ] || printf 'verdict=%s\n' "$verdict" >> "$GITHUB_OUTPUT"

if [ "${GATE_COMMENT:-}" = true ] && [ -n "${GATE_PULL_REQUEST:-}" ]; then
  { printf '%s\n' "$marker"; cat "$report"; } > "$folder/comment.md"
  # One comment a pull request: the last verdict replaces the one before.
  before=$(gh api "repos/$GH_REPO/issues/$GATE_PULL_REQUEST/comments" --paginate \
    --jq ".[] | select(.body | startswith(\"$marker\")) | .id" 2>/dev/null | tail -n 1)
  if [ -n "$before" ]; then
    gh api --method PATCH "repos/$GH_REPO/issues/comments/$before" --field "body=@$folder/comment.md" > /dev/null
  else
    gh api --method POST "repos/$GH_REPO/issues/$GATE_PULL_REQUEST/comments" --field "body=@$folder/comment.md" > /dev/null
  fi || echo 'The verdict could not be commented: the job needs the permission pull-requests=write.' >&2
fi
# Noise is no failure of the change; --inconclusive fail makes it one (exit code 1).
[ "$code" = 3 ] && exit 0
exit "$code"
