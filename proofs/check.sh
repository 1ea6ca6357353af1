#!/usr/bin/env bash
# Compiles every proof from clean and holds the table in README.md against what Coq says:
# each named statement exists in its file, and rests on no axiom but those that its row names.
#
#   proofs/check.sh            exit 0: all rows passed; 1: a proof or a row failed; 2: Coq is missing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export LC_ALL=C

required=(blindness fixed_sketch_misses frame_energy lse_lipschitz mass_interval output_error lse_merge select_top)
packages=(coq libcoq-mathcomp-algebra)
# A variable outside a section is an axiom in disguise: Coq only warns of it, under either name.
flags=(-q -Q . Locks -w "-notation-overridden,-ambiguous-paths,+local-declaration,+declaration-outside-section")

fail() {
    echo "proofs: $1" >&2
    exit "${2:-1}"
}

have_coq() {
    command -v coqc >/dev/null && [ -e "$(coqc -where)/user-contrib/mathcomp/algebra/all_algebra.vo" ]
}

install_coq() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null ||
        fail "Coq with MathComp's algebra is missing: install the Debian packages ${packages[*]}" 2
    echo "proofs: installing ${packages[*]}"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}"; } \
        >/dev/null || fail "could not install ${packages[*]}" 2
    have_coq || fail "Coq is still missing after its installation" 2
}

# The text of a Coq file without its comments, which may nest, and without its strings.
code_of() {
    perl -0777 -pe 's/"[^"]*"//g; s/(\(\*(?:(?1)|(?!\(\*|\*\)).)*\*\))/"\n" x ($1 =~ tr,\n,,)/gse' "$1"
}

# Nothing may be assumed, left open or exempted from Coq's checks.
refuse_assumptions() {
    local banned='Admitted|admit|give_up|Axioms?|Parameters?|Conjectures?|Primitive|bypass_check'
    local unchecked='(Unset|Set)[[:space:]]+(Guard|Positivity|Universe)[[:space:]]+Checking|Type[[:space:]]+in[[:space:]]+Type'
    local file found
    for file in *.v; do
        found=$(code_of "$file" | grep -nwE "$banned|$unchecked" | head -n 1) || true
        [ -z "$found" ] || fail "$file:$found: nothing may be assumed or left open"
    done
}

# Rows "| statement | `name` | `file.v` | axioms | ..." as "name file axioms"; the axioms are "none" or "reals".
table_rows() {
    sed -nE 's/^\|[^|]*\| `([A-Za-z0-9_]+)` \| `([a-z_]+\.v)` \| ([a-z]+) \|.*/\1 \2 \3/p' README.md
}

# The axioms that "reals" stands for: rows "| `Module.axiom` | ...".
reals_axioms() {
    sed -nE 's/^\| `([A-Za-z_]+(\.[A-Za-z_]+)+)` \|.*/\1/p' README.md | sort
}

# The axioms that a statement rests on, one a line; fails where there is no such statement.
axioms_of() {
    local name=$1 module=${2%.v} answer
    [ -e "$build/$2" ] || return 1
    printf 'From Locks Require %s.\nPrint Assumptions %s.%s.\n' "$module" "$module" "$name" >"$build/probe.v"
    answer=$(cd "$build" && coqc "${flags[@]}" probe.v 2>/dev/null) || return 1
    [ "$answer" = "Closed under the global context" ] ||
        grep -oE '^[A-Za-z_][A-Za-z0-9_.]*' <<<"$answer" | grep -vx Axioms | sort
}

# Says what is wrong with a row whose statement rests on the axioms $found, or nothing.
row_fault() {
    local named unlisted
    case $1 in
        none) named="" ;;
        reals) named=$(reals_axioms) ;;
        *) echo "unknown entry '$1' in the column of axioms"; return ;;
    esac
    unlisted=$(comm -13 <(echo "$named") <(echo "$found") | xargs)
    [ -z "$unlisted" ] || echo "rests on axioms that the table does not name: $unlisted"
}

refuse_assumptions
rows=$(table_rows)
for name in "${required[@]}"; do
    grep -q "^$name " <<<"$rows" || fail "README.md has no row for $name"
done

have_coq || install_coq
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
cp -- *.v "$build"

coqc --version | head -n 1
(
    cd "$build"
    order=$(coqdep -sort -Q . Locks ./*.v)
    for file in $order; do
        echo "coqc ${file#./}"
        coqc "${flags[@]}" "$file" || exit 1
    done
) || fail "a proof does not compile"

passed=0
failed=0
while read -r name file axioms; do
    if found=$(axioms_of "$name" "$file"); then
        fault=$(row_fault "$axioms")
    else
        fault="no such name"
    fi
    if [ -z "$fault" ]; then
        passed=$((passed + 1))
        echo "ok    $name ($file): $(xargs <<<"${found:-closed under the global context}")"
    else
        failed=$((failed + 1))
        echo "FAIL  $name ($file): $fault"
    fi
done <<<"$rows"

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
