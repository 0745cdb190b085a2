#!/usr/bin/env bash
# Checks the stages on a machine with a GPU, in one call (also ./workbook gpu-check). Needs nvcc, CMake, Ninja, GoogleTest, Google
# Benchmark and Python, and nothing from the network. Ends with a line PASS or FAIL for each phase.
#   scripts/gpu_check.sh [options]
#     --phases LIST             of build, tests, memcheck, racecheck, synccheck, initcheck, compare, bench; sanitize stands for the
#                               four tools of compute-sanitizer (all; compare only where the emulator's results are given)
#     --dependencies FOLDER     a prefix with the header-only libraries: see --pack-dependencies
#     --emulator-results FOLDER compares with what the emulator computed: see --make-emulator-results
#     --output FOLDER           where logs, benchmark results and summary.json go (build/gpu_check)
#     --stages LIST             as 01,03 (all)
#     --bench                   the full sweep in the phase bench, and not the quick one: see ./workbook bench --help
#     --peers                   PyTorch and flash-attn in the phase bench too, with the same sweep
#     --bench-seconds S         begins no benchmark after this long, which counts as a failure (480)
#     --bench-only PATTERN      only cases whose name matches this extended regular expression, as 'step03/.*bf16'; not for peers
# To be called beforehand on a machine without a GPU:
#     --pack-dependencies FOLDER      copies nlohmann-json and CLI11 from the system into FOLDER
#     --make-emulator-results FOLDER  builds the preset cpu and writes the emulator's results of the same cases
# WORKBOOK_EXTRA_INCLUDE names a folder with nlohmann/ and CLI/, where only these two are missing.
# Exit status: 0 when every phase passed, 1 when one failed, 2 for a bad argument.
set -euo pipefail

root=$(dirname -- "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")")
export WORKBOOK_COMMAND="scripts/gpu_check.sh${*:+ $*}" # what results say they come from

# Small problems that every stage takes: ragged, Nq != Nkv both ways, rows that see no key, GQA, each type and layout.
cases=(
    'ragged|--heads 2 --seq 113 --kv-seq 200 --head-dim 64 --dtype f32'
    'causal|--heads 2 --seq 127 --kv-seq 127 --head-dim 128 --dtype bf16 --causal'
    'unseen|--batch 2 --heads 4 --kv-heads 1 --seq 65 --kv-seq 33 --head-dim 64 --dtype f16 --causal'
    'bnhd|--batch 2 --heads 2 --seq 64 --kv-seq 257 --head-dim 32 --dtype bf16 --layout bnhd'
    'single|--seq 1 --kv-seq 1 --head-dim 64 --dtype f32'
    'outliers|--heads 2 --seq 128 --head-dim 64 --dtype bf16 --dist outliers'
    'packed|--heads 2 --kv-heads 1 --cu-seqlens-q 0,5,5,70,133 --cu-seqlens-k 0,9,12,12,140 --head-dim 64 --dtype bf16 --causal'
)

fail() {
    echo "gpu_check: $*" >&2
    exit 2
}

phases='' bench=quick peers=no dependencies='' emulator_results='' output=$root/build/gpu_check stages='' bench_seconds=480 bench_only=''
pack_into='' emulate_into=''
while (($#)); do
    case $1 in
        --bench) bench=full && shift && continue ;;
        --peers) peers=yes && shift && continue ;;
        -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
    esac
    if (($# < 2)); then fail "'$1' is unknown or lacks its value; --help lists the options"; fi
    case $1 in
        --phases) phases=$2 ;;
        --dependencies) dependencies=$(realpath -m -- "$2") ;;
        --emulator-results) emulator_results=$(realpath -m -- "$2") ;;
        --output) output=$(realpath -m -- "$2") ;;
        --stages) stages=$2 ;;
        --bench-seconds) bench_seconds=$2 ;;
        --bench-only) bench_only=$2 ;;
        --pack-dependencies) pack_into=$(realpath -m -- "$2") ;;
        --make-emulator-results) emulate_into=$(realpath -m -- "$2") ;;
        *) fail "'$1' is unknown; --help lists the options" ;;
    esac
    shift 2
done
if [[ -n $dependencies && ! -d $dependencies ]]; then fail "--dependencies=$dependencies: there is no such folder"; fi
if [[ -n $emulator_results && ! -d $emulator_results ]]; then fail "--emulator-results=$emulator_results: there is no such folder"; fi
if [[ ! $bench_seconds =~ ^[0-9]+$ ]]; then fail "--bench-seconds=$bench_seconds: a whole number is accepted"; fi
readonly tools=memcheck,racecheck,synccheck,initcheck
if [[ -z $phases ]]; then phases=build,tests,sanitize${emulator_results:+,compare},bench; fi
if [[ $bench == full || $peers == yes ]] && [[ $phases != *bench* ]]; then phases+=,bench; fi
phases=${phases//sanitize/$tools}
for phase in ${phases//,/ }; do
    case $phase in
        build | tests | memcheck | racecheck | synccheck | initcheck | bench) ;;
        compare) if [[ -z $emulator_results ]]; then fail '--phases=compare needs --emulator-results FOLDER'; fi ;;
        *) fail "--phases: '$phase' is unknown; build,tests,sanitize,$tools,compare,bench are accepted" ;;
    esac
done

cd -- "$root"
numbers=()
for folder in steps/[0-9][0-9]_*/ steps/[a-z]_*/; do
    number=${folder#steps/}
    number=${number%%_*}
    if [[ -z $stages || ,$stages, == *,$number,* ]]; then numbers+=("$number"); fi
done
if ((!${#numbers[@]})); then fail "--stages=$stages: no such stage; accepted are the numbers of the folders in steps/"; fi

# compared NN: options that choose what is compared with the emulator, where the last variants are not it. 06d multiplies in FP8, for
# which the bounds of the comparison are not made.
compared() { if [[ $1 == 06 ]]; then echo '--variant 06c --variant 06e'; fi; }

# program PRESET NN
program() { echo "$root/build/$1/steps"/"$2"_*/"step$2"; }

# ---------------------------------------------------------------------------------------------------------------------
# What is prepared on a machine without a GPU

if [[ -n $pack_into ]]; then
    mkdir -p -- "$pack_into/include"
    for header in nlohmann CLI; do
        for prefix in /usr/include /usr/local/include; do
            if [[ -d $prefix/$header ]]; then cp -rL -- "$prefix/$header" "$pack_into/include/" && break; fi
        done
        if [[ ! -d $pack_into/include/$header ]]; then fail "$header/ is neither in /usr/include nor in /usr/local/include; ./workbook doctor tells what to install"; fi
    done
    du -sh -- "$pack_into"
fi
if [[ -n $emulate_into ]]; then
    mkdir -p -- "$emulate_into"
    for number in "${numbers[@]}"; do
        ./workbook run "$number" --cpu --list >/dev/null
        for case in "${cases[@]}"; do
            read -r -a options <<<"${case#*|} $(compared "$number")"
            "$(program cpu "$number")" "${options[@]}" --quiet --output "$emulate_into/$number-${case%%|*}.safetensors" ||
                if (($? != 3)); then exit 1; fi # 3: refused, as it will be on the GPU
        done
    done
    du -sh -- "$emulate_into"
fi
if [[ -n $pack_into || -n $emulate_into ]]; then exit 0; fi

# ---------------------------------------------------------------------------------------------------------------------
# Phases: each prints what it did and returns whether it passed.

mkdir -p -- "$output"
nvcc=''
for candidate in "${CUDA_HOME:-}/bin/nvcc" "${CUDA_PATH:-}/bin/nvcc" nvcc /usr/local/cuda/bin/nvcc; do
    if command -v -- "$candidate" >/dev/null 2>&1; then nvcc=$(command -v -- "$candidate") && break; fi
done
if ! nvidia-smi --query-gpu=name,compute_cap,driver_version,clocks.max.sm,clocks.max.mem,power.limit --format=csv >"$output/gpu.csv"; then
    echo 'gpu_check: nvidia-smi finds no GPU' >&2
    exit 1
fi
cat -- "$output/gpu.csv"

phase_build() {
    local arguments=() architectures
    if [[ -z $nvcc ]]; then echo 'no nvcc found (looked at CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda)' && return 1; fi
    "$nvcc" --version | tail -n 2 | tee "$output/nvcc.txt"
    architectures=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | tr -d ' .' | sort -u | paste -sd ';')
    arguments=("-DCMAKE_CUDA_COMPILER=$nvcc" "-DWORKBOOK_CUDA_ARCHITECTURES=$architectures")
    if [[ -n $dependencies ]]; then arguments+=("-DCMAKE_PREFIX_PATH=$dependencies"); fi
    if [[ -n ${WORKBOOK_EXTRA_INCLUDE:-} ]]; then
        arguments+=("-DNLOHMANN_JSON_INCLUDE=$WORKBOOK_EXTRA_INCLUDE" "-DCLI11_INCLUDE=$WORKBOOK_EXTRA_INCLUDE")
    fi
    if ! cmake --preset gpu "${arguments[@]}" >"$output/configure.log" 2>&1; then tail -n 40 -- "$output/configure.log" && return 1; fi
    # What does not compile stops neither the rest of the build nor the later phases.
    if ! cmake --build --preset gpu --parallel -- -k 0 >"$output/build.log" 2>&1; then
        grep -E 'error|FAILED' -- "$output/build.log" | head -n 40
        return 1
    fi
    if grep -E 'warning' -- "$output/build.log"; then echo 'the build is not free of warnings' && return 1; fi
}

phase_tests() {
    # A GPU that several programs share is no faster, but most of a test is the float64 reference on the host.
    ctest --preset gpu --parallel 8 --no-tests=error --output-log "$output/ctest.log" >"$output/ctest.out" 2>&1 </dev/null || {
        grep -E -v '^ *Start |Passed' -- "$output/ctest.out" | tail -n 80
        return 1
    }
    tail -n 4 -- "$output/ctest.out"
}

# run_case KIND NN CASE OPTIONS: one run of a program, its log in $output/KIND; prints PASS, FAIL or refused.
run_case() {
    local kind=$1 number=$2 name=$3 log=$output/$1/$2-$3.log status=0 options tool=()
    read -r -a options <<<"$4"
    case $kind in
        compare)
            read -r -a options <<<"$4 $(compared "$number")"
            options+=(--output "$output/compare/$number-$name.safetensors")
            ;;
        *) tool=(compute-sanitizer --tool "$kind" --error-exitcode 99 --print-limit 20) ;;
    esac
    timeout 300 "${tool[@]}" "$(program gpu "$number")" "${options[@]}" --repeats 1 --quiet >"$log" 2>&1 </dev/null || status=$?
    if [[ $kind == compare && $status == 0 ]]; then
        scripts/compare_results.py "$output/compare/$number-$name.safetensors" "$emulator_results/$number-$name.safetensors" >>"$log" 2>&1 || status=$?
    fi
    case $status in
        0) echo "PASS step$number $name" ;;
        3) echo "refused step$number $name: $(grep -m 1 '^step' -- "$log")" ;;
        *) echo "FAIL step$number $name (exit status $status; ${log#"$root"/})" ;;
    esac
}

# run_cases KIND: all stages and cases, several at a time. Every stage must have passed one case, and none may have failed.
run_cases() {
    local kind=$1 number case status=0
    mkdir -p -- "$output/$kind"
    rm -f -- "$output/$kind"/*
    for number in "${numbers[@]}"; do
        for case in "${cases[@]}"; do
            while (($(jobs -rp | wc -l) >= 6)); do wait -n || true; done
            run_case "$kind" "$number" "${case%%|*}" "${case#*|}" >"$output/$kind/$number-${case%%|*}.result" &
        done
    done
    wait
    for number in "${numbers[@]}"; do
        if ! grep -q '^PASS' -- "$output/$kind/$number"-*.result; then echo "$kind: step$number passed no case" && status=1; fi
    done
    if grep -h '^FAIL' -- "$output/$kind"/*.result >"$output/$kind.failures"; then
        status=1
        sed "s/^/$kind: /" -- "$output/$kind.failures"
        grep -h -m 4 -E 'WRONG|ERROR SUMMARY|=========.*(Error|Invalid|hazard|Uninit|Race)|^step' -- "$output/$kind"/*.log | grep -v 'SUMMARY: 0 errors' | sort | uniq -c | sort -rn | head -n 12
    fi
    grep -h '^refused' -- "$output/$kind"/*.result | sed "s/^/$kind: /" || true
    echo "$kind: $(cat -- "$output/$kind"/*.result | grep -c '^PASS') of $((${#numbers[@]} * ${#cases[@]})) runs passed"
    return $status
}

# phase_tool TOOL
phase_tool() {
    if ! command -v compute-sanitizer >/dev/null 2>&1; then
        PATH=$PATH:$(dirname -- "$nvcc"):/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer
        if ! command -v compute-sanitizer >/dev/null 2>&1; then echo 'compute-sanitizer is not on PATH' && return 1; fi
    fi
    run_cases "$1"
}

phase_compare() { run_cases compare; }

# Wrong results fail, and so does what there was no time for; what a stage refuses is in the results with its reason.
phase_bench() {
    local number program file status=0 exit_status begin=$SECONDS left sweep=() filter=() files=() peer_sweep=(--sweep --gqa) results=$output/bench
    mkdir -p -- "$results"
    rm -f -- "$results"/*
    if [[ $bench == quick ]]; then sweep=(--quick) peer_sweep=(--quick); fi
    if [[ -n $bench_only ]]; then filter=("--benchmark_filter=$bench_only"); fi
    for number in "${numbers[@]}"; do
        program=$root/build/gpu/bench/bench_step$number
        file=$results/step$number.json
        left=$((bench_seconds - (SECONDS - begin)))
        if [[ ! -x $program ]]; then
            echo "bench_step$number was not built: see configure.log (is Google Benchmark there?) and build.log"
            status=1
        elif ((left < 1)); then
            echo "bench_step$number was not started within --bench-seconds $bench_seconds"
            status=1
        else
            exit_status=0
            # The time limit is for a kernel that hangs: --stop-after ends the sweep earlier.
            timeout $((left + 120)) "$program" "${sweep[@]}" "${filter[@]}" --stop-after "$left" "--benchmark_out=$file" >"$results/step$number.log" 2>&1 </dev/null ||
                exit_status=$?
            if ((exit_status == 2)) && [[ -n $bench_only ]] && grep -q 'Failed to match' -- "$results/step$number.log"; then
                rm -f -- "$file"
            elif ((exit_status != 0 && exit_status != 3)); then
                echo "bench_step$number: exit status $exit_status"
                tail -n 5 -- "$results/step$number.log"
                status=1
            fi
            if [[ -s $file ]]; then files+=("$file"); fi
        fi
    done
    if ((${#files[@]})); then
        python3 scripts/merge_benchmarks.py "${files[@]}" --output "$results/stages.json" || status=1
    else
        echo "no case was run${bench_only:+: --bench-only=$bench_only matches none}"
        status=1
    fi
    if [[ $peers == yes ]]; then
        left=$((bench_seconds - (SECONDS - begin)))
        exit_status=0
        if ((left < 1)); then
            echo "peers.py was not started within --bench-seconds $bench_seconds"
            status=1
        else
            timeout "$left" python3 bench/peers.py "${peer_sweep[@]}" --out "$results/peers.json" >"$results/peers.log" 2>&1 </dev/null || exit_status=$?
            left=$((bench_seconds - (SECONDS - begin)))
            if ((exit_status == 0 && left >= 1)) && [[ " ${numbers[*]} " == *' 05 '* ]]; then
                timeout "$left" python3 bench/peers.py "${peer_sweep[@]}" --backward --no-ceilings --out "$results/peers-backward.json" \
                    >>"$results/peers.log" 2>&1 </dev/null || exit_status=$?
            fi
            if ((exit_status != 0)); then
                echo "peers.py: exit status $exit_status$(if ((exit_status == 124)); then echo " (not done within --bench-seconds $bench_seconds)"; fi)"
                tail -n 5 -- "$results/peers.log"
                status=1
            fi
        fi
    fi
    files=()
    for file in "$results"/stages.json "$results"/peers.json "$results"/peers-backward.json; do
        if [[ -s $file ]]; then files+=("$file"); fi
    done
    if ((${#files[@]})); then
        python3 bench/report.py --table "${files[@]}" >"$results/table.txt" || status=1
        cat -- "$results/table.txt"
    fi
    return $status
}

summary=() records=() failed=0
for phase in ${phases//,/ }; do
    echo
    echo "==== $phase"
    begin=$SECONDS
    # Not under 'if' or '||', which would switch off errexit in the phase: a subshell of its own.
    set +e
    (
        set -e
        case $phase in
            build) phase_build ;;
            tests) phase_tests ;;
            compare) phase_compare ;;
            bench) phase_bench ;;
            *) phase_tool "$phase" ;;
        esac
    )
    status=$?
    set -e
    verdict=PASS
    if ((status != 0)); then verdict=FAIL failed=1; fi
    summary+=("$(printf '%s  %-9s %4d s' "$verdict" "$phase" $((SECONDS - begin)))")
    echo "${summary[-1]}"
    records+=("$phase=$verdict=$((SECONDS - begin))")
done
echo
echo "==== summary (logs in $output)"
printf '%s\n' "${summary[@]}"

# The same for programs.
python3 - "$output" "$(if [[ -n $nvcc ]]; then "$nvcc" --version; fi)" "${records[@]}" <<'PYTHON'
import csv, datetime, json, os, re, sys

output, nvcc, records = sys.argv[1], sys.argv[2], [record.split("=") for record in sys.argv[3:]]
with open(os.path.join(output, "gpu.csv"), encoding="utf-8") as file:
    gpu = {key.strip(): value.strip() for key, value in next(csv.DictReader(file)).items()}
release = re.search(r"release ([0-9.]+)", nvcc)
summary = {
    "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    "gpu": gpu["name"],
    "compute_capability": gpu["compute_cap"],
    "driver": gpu["driver_version"],
    "cuda": release[1] if release else None,
    "passed": all(status == "PASS" for _, status, _ in records),
    "phases": [{"phase": phase, "status": status, "seconds": int(seconds)} for phase, status, seconds in records],
}
with open(os.path.join(output, "summary.json"), "w", encoding="utf-8") as file:
    json.dump(summary, file, indent=1)
    file.write("\n")
PYTHON
exit $failed
