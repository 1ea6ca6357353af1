#!/usr/bin/env bash
# Plants faults in a scratch copy of this folder: check.sh has to refuse each and to say why.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failed=0

# refused WHAT EDIT MESSAGE...: after EDIT, check.sh fails on the copy and prints every MESSAGE.
refused() {
    local what=$1 edit=$2 verdict="" said message
    shift 2
    rm -rf "$scratch/copy"
    mkdir "$scratch/copy"
    cp -- *.v check.sh README.md "$scratch/copy"
    (cd "$scratch/copy" && eval "$edit")
    ! said=$("$scratch/copy/check.sh" 2>&1) || verdict="accepted"
    for message in "$@"; do
        grep -qF -- "$message" <<<"$said" || verdict="${verdict:-no word of '$message' in: $(tail -n 1 <<<"$said")}"
    done
    echo "${verdict:-refused}: $what"
    [ -z "$verdict" ] || failed=$((failed + 1))
}

open='nothing may be assumed or left open'
refused "an open proof" "sed -i '0,/^Qed\./s//Admitted./' merge.v" "merge.v:" "$open"
refused "an axiom" "printf 'Axiom oracle : False.\n' >>lse.v" "lse.v:" "$open"
refused "a parameter behind a nested comment" \
    "printf '(* a (* nested *) comment *) Parameter oracle : False.\n' >>frame.v" "frame.v:" "$open"
refused "an exemption from the guard" "printf 'Unset Guard Checking.\n' >>select.v" "select.v:" "$open"
refused "a theorem without a row" "sed -i '/| \`select_top\` |/d' README.md" "README.md has no row for select_top"
refused "a variable outside a section" "printf 'Variable oracle : False.\n' >>real_sum.v" \
    "[local-declaration" "a proof does not compile"
refused "a false statement" "sed -i 's/count_ge 0 s = size s/count_ge 0 s = 0/' radix.v" \
    "a proof does not compile"
refused "rows that do not hold" \
    "sed -i 's/\`certificate\`/\`oracle\`/; s/\`logit_error\` | \`lse/\`logit_error\` | \`merge/
             /\`lse_merge\`/s/| reals |/| none |/; /\`output_error\`/s/| reals |/| some |/' README.md" \
    "FAIL  oracle (output.v): no such name" \
    "FAIL  logit_error (merge.v): no such name" \
    "FAIL  lse_merge (merge.v): rests on axioms that the table does not name: ClassicalDedekindReals.sig_forall_dec" \
    "FAIL  output_error (output.v): unknown entry 'some'" \
    "10 passed, 4 failed"
refused "an axiom that is not in the list" "sed -i '/^| \`Classical_Prop.classic\`/d' README.md" \
    "FAIL  lse_lipschitz (lse.v): rests on axioms that the table does not name: Classical_Prop.classic"

[ "$failed" = 0 ] || exit 1
echo "every planted fault was refused"
