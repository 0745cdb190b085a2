#!/usr/bin/env bash
# Checks the stages on a machine with a GPU, in one call. Needs nvcc, CMake, Ninja, GoogleTest and Python, and nothing from the network.
#   scripts/gpu_check.sh [options]
#     --phases LIST             build,tests,sanitize,compare,bench (build,tests,sanitize, and compare where results are given)
#     --dependencies FOLDER     a prefix with the header-only libraries: see --pack-dependencies
#     --emulator-results FOLDER compares with what the emulator computed: see --make-emulator-results
#     --output FOLDER           where logs and benchmark results go (build/gpu_check)
#     --stages LIST             as 01,03 (all)
#     --bench                   adds the phase bench: the sweep of FlashAttention-2's paper, B*N = 16384 and H*d = 2048
#     --bench-seconds S         starts no benchmark after this long (480)
#     --bench-only PATTERN      only runs whose options match this extended regular expression
# To be called beforehand on a machine without a GPU:
#     --pack-dependencies FOLDER      copies nlohmann-json and CLI11 from the system into FOLDER
#     --make-emulator-results FOLDER  builds the preset cpu and writes the emulator's results of the same cases
# WORKBOOK_EXTRA_INCLUDE names a folder with nlohmann/ and CLI/, where only these two are missing.
# Exit status: 0 when every phase passed, 1 when one failed, 2 for a bad argument.
set -euo pipefail

root=$(dirname -- "$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")")

# Small problems that every stage takes: ragged, Nq != Nkv both ways, rows that see no key, GQA, each type and layout.
cases=(
    'ragged|--heads 2 --seq 113 --kv-seq 200 --head-dim 64 --dtype f32'
    'causal|--heads 2 --seq 127 --kv-seq 127 --head-dim 128 --dtype bf16 --causal'
    'unseen|--batch 2 --heads 4 --kv-heads 1 --seq 65 --kv-seq 33 --head-dim 64 --dtype f16 --causal'
    'bnhd|--batch 2 --heads 2 --seq 64 --kv-seq 257 --head-dim 32 --dtype bf16 --layout bnhd'
    'single|--seq 1 --kv-seq 1 --head-dim 64 --dtype f32'
    'outliers|--heads 2 --seq 128 --head-dim 64 --dtype bf16 --dist outliers'
)

fail() {
    echo "gpu_check: $*" >&2
    exit 2
}

phases='' bench=no dependencies='' emulator_results='' output=$root/build/gpu_check stages='' bench_seconds=480 bench_only=.
pack_into='' emulate_into=''
while (($#)); do
    case $1 in
        --bench) bench=yes && shift && continue ;;
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
if [[ -z $phases ]]; then phases=build,tests,sanitize${emulator_results:+,compare}; fi
if [[ $bench == yes && $phases != *bench* ]]; then phases+=,bench; fi
for phase in ${phases//,/ }; do
    case $phase in
        build | tests | sanitize | bench) ;;
        compare) if [[ -z $emulator_results ]]; then fail '--phases=compare needs --emulator-results FOLDER'; fi ;;
        *) fail "--phases: '$phase' is unknown; build,tests,sanitize,compare,bench are accepted" ;;
    esac
done

cd -- "$root"
numbers=()
for folder in steps/[0-9][0-9]_*/; do
    number=${folder#steps/}
    number=${number:0:2}
    if [[ -z $stages || ,$stages, == *,$number,* ]]; then numbers+=("$number"); fi
done
if ((!${#numbers[@]})); then fail "--stages=$stages: no such stage; accepted are the numbers of the folders in steps/"; fi

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
            read -r -a options <<<"${case#*|}"
            "$(program cpu "$number")" "${options[@]}" --quiet --output "$emulate_into/$number-${case%%|*}.safetensors"
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
        compare) options+=(--output "$output/compare/$number-$name.safetensors") ;;
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

phase_sanitize() {
    local tool status=0
    if ! command -v compute-sanitizer >/dev/null 2>&1; then
        PATH=$PATH:$(dirname -- "$nvcc"):/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer
        if ! command -v compute-sanitizer >/dev/null 2>&1; then echo 'compute-sanitizer is not on PATH' && return 1; fi
    fi
    for tool in memcheck racecheck synccheck initcheck; do run_cases "$tool" || status=1; done
    return $status
}

phase_compare() { run_cases compare; }

# The sweep, shortest first. Wrong results fail; what a stage refuses or --max-seconds skips is in the results with its reason.
phase_bench() {
    local length dim type causal number options status=0 exit_status begin=$SECONDS late=0 runs=0
    : >"$output/bench.jsonl"
    : >"$output/bench.log"
    for length in 512 1024 2048 4096 8192 16384; do
        for dim in 64 128; do
            for type in bf16 f32; do
                for causal in '' --causal; do
                    for number in "${numbers[@]}"; do
                        options="--batch $((16384 / length)) --heads $((2048 / dim)) --seq $length --head-dim $dim --dtype $type $causal"
                        if ! grep -q -E -- "$bench_only" <<<"step$number $options"; then continue; fi
                        if ((SECONDS - begin > bench_seconds)); then
                            echo "not run, too late: step$number $options" >>"$output/bench.log"
                            late=$((late + 1))
                            continue
                        fi
                        exit_status=0
                        # shellcheck disable=SC2086  # a list of words
                        timeout 120 "$(program gpu "$number")" $options --max-seconds 10 --json >>"$output/bench.jsonl" 2>>"$output/bench.log" </dev/null || exit_status=$?
                        runs=$((runs + 1))
                        if ((exit_status != 0 && exit_status != 3)); then
                            echo "exit status $exit_status: step$number $options" | tee -a "$output/bench.log"
                            status=1
                        fi
                    done
                done
            done
        done
    done
    echo "$runs runs, $(grep -c '"status":"ok"' -- "$output/bench.jsonl") right and timed, in ${output#"$root"/}/bench.jsonl"
    if ((late)); then
        echo "$late runs were not started within --bench-seconds $bench_seconds: see bench.log"
        status=1
    fi
    if ((!runs)); then echo "--bench-only=$bench_only matches no run" && status=1; fi
    return $status
}

summary=() failed=0
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
            sanitize) phase_sanitize ;;
            compare) phase_compare ;;
            bench) phase_bench ;;
        esac
    )
    status=$?
    set -e
    verdict=PASS
    if ((status != 0)); then verdict=FAIL failed=1; fi
    summary+=("$(printf '%s  %-9s %4d s' "$verdict" "$phase" $((SECONDS - begin)))")
    echo "${summary[-1]}"
done
echo
echo "==== summary (logs in $output)"
printf '%s\n' "${summary[@]}"
exit $failed
