#!/usr/bin/env bash
# Compiles every .cu of common/ and of the stages with nvcc, without linking, and prints what each kernel takes: registers,
# spilled bytes, stack, shared memory. Fails when a file does not compile, when a kernel spills that is not in
# scripts/allowed_spills.txt, or when ptxas makes wgmmas wait for each other. Needs nvcc, and no GPU.
# Stage 06 is compiled for 90a alone, whatever the list says: no other architecture has its instructions.
#   scripts/compile_stages.sh [--architectures 80,90] [--output FOLDER] [--if-nvcc] [NN ...]
# Without nvcc the exit status is 1; with --if-nvcc it is 0 and the output says that nothing was compiled.
# Shared memory is what is known at compile time; dynamic shared memory is asked for at launch.
set -euo pipefail

root=$(dirname -- "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")")
allowed=$root/scripts/allowed_spills.txt
output=$root/build/compile_stages
architectures=80,90
stages=()
if_nvcc=no
while (($#)); do
    case $1 in
        --architectures | --output)
            if (($# < 2)); then echo "$1: its value is missing" >&2 && exit 2; fi
            if [[ $1 == --output ]]; then output=$(realpath -m -- "$2"); else architectures=$2; fi
            shift
            ;;
        --if-nvcc) if_nvcc=yes ;;
        [0-9][0-9] | [a-z])
            if ! compgen -G "$root/steps/$1_*" >/dev/null; then echo "stage $1 does not exist" >&2 && exit 2; fi
            stages+=("$1")
            ;;
        -h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
        *) echo "'$1' is unknown; accepted: --architectures LIST, --output FOLDER, --if-nvcc, two-digit stages, letters of the appendix" >&2 && exit 2 ;;
    esac
    shift
done
if [[ ! $architectures =~ ^[0-9]+[af]?(,[0-9]+[af]?)*$ ]]; then
    echo "--architectures=$architectures: numbers separated by commas are accepted, as 80,90a" >&2
    exit 2
fi

nvcc=''
for candidate in "${CUDA_HOME:-}/bin/nvcc" "${CUDA_PATH:-}/bin/nvcc" nvcc /usr/local/cuda/bin/nvcc; do
    if command -v -- "$candidate" >/dev/null 2>&1; then nvcc=$candidate && break; fi
done
if [[ -z $nvcc ]]; then
    echo 'no nvcc found (looked at CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda)' >&2
    if [[ $if_nvcc == yes ]]; then echo 'SKIPPED: no kernel was compiled for a GPU' && exit 0; fi
    exit 1
fi

cd -- "$root"
if ((${#stages[@]})); then
    mapfile -t sources < <(for stage in "${stages[@]}"; do find steps/"$stage"_* -name '*.cu'; done | sort -r)
else
    # Later stages take longer: they go first, and no core waits for them at the end.
    mapfile -t sources < <(find common steps -name '*.cu' | sort -r)
fi
if ((!${#sources[@]})); then echo "no .cu files found in $root" >&2 && exit 1; fi

rm -rf -- "$output"
mkdir -p -- "$output"
# Whether every kernel is seen, so that a line of the list which matches none is stale.
whole=$((${#stages[@]} == 0))
if [[ $architectures != 80,90 ]]; then whole=0; fi
flags=(-std=c++20 -O1 -DNDEBUG -DSIMT_GPU -Icommon -Isteps -Xcompiler=-Wall -Xcompiler=-Wextra -Xcompiler=-Wno-unknown-pragmas
    -Wno-deprecated-gpu-targets -Xptxas=-v -Werror=all-warnings)
# Thrust's headers lie in a folder of their own from CUDA 13 on; nvcc knows it.
# The architectures of a source as nvcc's options, one a line.
targets_of() {
    local list architecture
    if [[ $1 == steps/06_* ]]; then list=(90a); else IFS=, read -r -a list <<<"$architectures"; fi
    for architecture in "${list[@]}"; do echo "-gencode=arch=compute_$architecture,code=sm_$architecture"; done
}

# One file a process, as many as there are cores.
compile() {
    local source=$1 name begin=$SECONDS targets
    name=${source//\//.}
    mapfile -t targets < <(targets_of "$source")
    if "$nvcc" "${flags[@]}" "${targets[@]}" -c "$source" -o "$output/$name.o" >"$output/$name.log" 2>&1; then
        echo "compiled $source ($((SECONDS - begin)) s)" >&2
    else
        echo "FAILED   $source" >&2
        touch -- "$output/$name.failed"
    fi
    rm -f -- "$output/$name.o"
}
pids=()
for source in "${sources[@]}"; do
    while (($(jobs -rp | wc -l) >= $(nproc))); do wait -n || true; done
    compile "$source" &
    pids+=($!)
done
wait "${pids[@]}"

# ptxas says for each kernel "Compiling entry function 'X' for 'sm_N'", "Function properties for X" with the spills, "Used ...".
for log in "$output"/*.log; do
    awk -v file="$(basename -- "$log" .cu.log)" '
        /Compiling entry function/ { split($0, part, "\047"); arch = part[4] }
        /Function properties for/ { name = $NF; if (!((name, arch) in known)) { known[name, arch] = 1; order[++count] = name SUBSEP arch } }
        /bytes stack frame/ {
            stack[name, arch] = number("bytes stack frame"); stores[name, arch] = number("bytes spill stores")
            loads[name, arch] = number("bytes spill loads")
        }
        /Used [0-9]+ registers/ {
            match($0, /Used [0-9]+/); registers[name, arch] = substr($0, RSTART + 5, RLENGTH - 5)
            shared[name, arch] = number("bytes smem")
        }
        function number(unit,    at, words, n) {
            at = index($0, " " unit)
            if (!at) return 0
            n = split(substr($0, 1, at - 1), words, " ")
            return words[n]
        }
        END {
            for (i = 1; i <= count; i++) {
                split(order[i], key, SUBSEP); name = key[1]; arch = key[2]
                printf "%s\t%s\t%s\t%d\t%d\t%d\t%d\t%s\n", file, arch, (name, arch) in registers ? registers[name, arch] : "-", \
                    stores[name, arch], loads[name, arch], stack[name, arch], shared[name, arch], name
            }
        }' "$log"
done | c++filt >"$output/kernels.tsv"

# One line a kernel, its figures for each architecture separated by /. The kernels that Thrust brings along are one line a file,
# the largest figures counting; they must not spill either.
LC_ALL=C sort -t $'\t' -k1,1 -k8,8 -k2,2V "$output/kernels.tsv" | awk -F '\t' -v allowed="$allowed" -v whole="$whole" '
    function short(name) { return length(name) > 100 ? substr(name, 1, 97) "..." : name }
    function most(a, b) { return a + 0 > b + 0 ? a : b }
    function flush_line() { if (last != "") printf format, last_file, registers, spilled, stack, shared, short(last); last = "" }
    BEGIN {
        while ((getline line < allowed) > 0) {
            lines++
            if (line ~ /^[[:space:]]*(#|$)/) continue
            at = index(line, "#")
            piece = substr(line, 1, at ? at - 1 : length(line))
            gsub(/^[[:space:]]+|[[:space:]]+$/, "", piece)
            if (!at || substr(line, at + 1) ~ /^[[:space:]]*$/) { problems = problems "scripts/allowed_spills.txt:" lines ": the reason is missing after #\n"; bad = 1 }
            pieces[++n] = piece
        }
        format = "%-28s %10s %10s %10s %10s  %s\n"
        printf format, "", "registers", "spilled B", "stack B", "shared B", "kernel"
    }
    {
        name = $8
        sub(/^void /, "", name)
        gsub(/workbook::|\(anonymous namespace\)::/, "", name)
        sub(/\(.*/, "", name)
        file = $1
        sub(/^steps\./, "", file)
        if (name ~ /^(thrust|cub)::/) {
            if (!(file in library)) files[++many] = file
            library[file] = 1
            library_registers[file] = most(library_registers[file], $3)
            library_spills[file] += $4 + $5
        } else if (last == name && last_file == file) {
            registers = registers "/" $3; spilled = spilled "/" $4 + $5; stack = stack "/" $6; shared = shared "/" $7
        } else {
            flush_line()
            last = name; last_file = file; registers = $3; spilled = $4 + $5; stack = $6; shared = $7
        }
        if ($4 + $5) {
            excused = 0
            for (i = 1; i <= n; i++) if (index(name " [" $2 "]", pieces[i])) { used[i] = 1; excused = 1 }
            if (!excused) { problems = problems sprintf("spills %d bytes: %s [%s] in %s\n", $4 + $5, name, $2, file); bad = 1 }
        }
    }
    END {
        flush_line()
        for (i = 1; i <= many; i++) printf format, files[i], "<= " library_registers[files[i]], library_spills[files[i]], "", "", "kernels of Thrust"
        for (i = 1; i <= n; i++) if (whole && !used[i]) { problems = problems "scripts/allowed_spills.txt: \047" pieces[i] "\047 matches no spilling kernel\n"; bad = 1 }
        printf "%s", problems
        exit bad
    }' || spills=yes

failed=("$output"/*.failed)
if [[ -e ${failed[0]} ]]; then
    for mark in "${failed[@]}"; do
        echo "---- ${mark%.failed}"
        grep -v -e 'ptxas info' -e 'bytes stack frame' "${mark%.failed}.log" | tail -n 40
    done
    echo "FAIL: ${#failed[@]} of ${#sources[@]} files do not compile for sm_${architectures//,/, sm_}"
    exit 1
fi
# C7510 to C7512: registers or control flow keep ptxas from running wgmmas asynchronously, at a third of the speed.
if grep -hE '\(C751[0-2]\)' "$output"/*.log; then spills=yes; fi
if [[ -n ${spills:-} ]]; then echo 'FAIL: see the lines above' && exit 1; fi
echo "PASS: ${#sources[@]} files compile for sm_${architectures//,/, sm_} (stage 06: sm_90a); no kernel spills that may not"
