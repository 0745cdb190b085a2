# A stage cut down to one type and one shape. To show a mistake that is enough, and each further one costs seconds of compile time.

# workbook_one_shape(<variable> <NN> <source>): the variable holds stage.cu of stage NN, or fp8.cu of stage 06. `shared_keys` may name the
# shape of 05c: its fields are D, Br, queries at a time, warps, 16-key tiles of a warp, warps that share keys. Variants of 06 that have a
# source of their own are left out; where `with_fp8` is set, 06d stays.
function(workbook_one_shape variable number source)
  set(text "${${variable}}")
  macro(cut find replace)
    string(FIND "${text}" "${find}" position)
    if(position EQUAL -1)
      message(WARNING "${source} of stage ${number} no longer holds: ${find}; cmake/OneShape.cmake leaves more shapes than one")
    endif()
    string(REPLACE "${find}" "${replace}" text "${text}")
  endmacro()
  if(number STREQUAL "01")
    cut("if (d <= 32) return forward<T, 1>(args);" "")
    cut("if (d <= 128) return forward<T, 4>(args);" "")
    cut("return forward<T, 8>(args);" "return forward<T, 2>(args);")
    cut("if (d <= 64) return forward<T, 2>(args);" "")
  elseif(number STREQUAL "02")
    cut("if (d <= 2 * kPerLane) return forward<T, 2>(args);" "")
    cut("if (d <= 8 * kPerLane) return forward<T, 8>(args);" "")
    cut("return forward<T, 16>(args);" "return forward<T, 4>(args);")
    cut("if (d <= 4 * kPerLane) return forward<T, 4>(args);" "")
  elseif(number STREQUAL "03")
    cut("case 32: return forward<T, 32>(args);" "")
    cut("case 64: return forward<T, 64>(args);" "")
    cut("default: return forward<T, 128>(args);" "default: return forward<T, 64>(args);")
  elseif(number STREQUAL "04")
    cut("case 64: return few ? f.template operator()<Shape<64, 64, 4, 1>>() : f.template operator()<Shape<64, 64, 4, 2>>();"
        "case 64: return f.template operator()<Shape<64, 64, 4, 1>>();")
    cut("case 128: return few ? f.template operator()<Shape<128, 64, 4, 1>>() : f.template operator()<Shape<128, 64, 4, 2>>();" "")
    cut("Shape<256, 64, 8, 1>" "Shape<64, 64, 4, 1>")
    cut("Shape<256, 32, 4, 1>" "Shape<64, 64, 4, 1>")
  elseif(number STREQUAL "05")
    if(NOT shared_keys)
      set(shared_keys "64, 64, 32, 4, 2, 1")
    endif()
    cut("if (p.head_dim <= 2 * kPerLane) return f.template operator()<T, 2>();" "")
    cut("if (p.head_dim <= 4 * kPerLane) return f.template operator()<T, 4>();" "")
    cut("if (p.head_dim <= 8 * kPerLane) return f.template operator()<T, 8>();" "")
    cut("return f.template operator()<T, 16>();" "return f.template operator()<T, 4>();")
    cut("if (p.head_dim <= 32) return f.template operator()<T, 1>();" "")
    cut("if (p.head_dim <= 128) return f.template operator()<T, 4>();" "")
    cut("return f.template operator()<T, 8>();" "return f.template operator()<T, 2>();")
    cut("if (p.head_dim <= 64) return f.template operator()<T, 2>();" "")
    cut("if (p.head_dim == 64) return f.template operator()<Shape<64, 64, 32, 4, 2, 1>>();" "")
    cut("Shape<128, 64, 32, 8, 2, 2>" "Shape<${shared_keys}>")
    cut("Shape<128, 64, 32, 4, 2, 2>" "Shape<${shared_keys}>")
  elseif(source STREQUAL "fp8.cu")
    cut("case 64: return f.template operator()<Fp8Shape<64, 4, 8, 24, 112>>();" "")
    cut("case 128: return f.template operator()<Fp8Shape<128, 3, 8, 32, 160>>();" "")
    cut("Fp8Shape<256, 2, 3, 24, 240>" "Fp8Shape<64, 4, 8, 24, 112>")
  elseif(number STREQUAL "06")
    cut("case 64: return f.template operator()<Shape<64, 128, 2>>();" "")
    cut("case 128: return f.template operator()<Shape<128, 96, 2>>();" "")
    cut("default: return f.template operator()<Shape<256, 64, 1>>();" "default: return f.template operator()<Shape<64, 128, 2>>();")
    cut("case 64: return f.template operator()<PingpongShape<64, 128>>();" "")
    cut("case 128: return f.template operator()<PingpongShape<128, 128>>();" "")
    cut("default: return f.template operator()<PingpongShape<256, 80>>();"
        "default: return f.template operator()<PingpongShape<64, 128>>();")
    cut(",
                     vote_first_variant()" "")
    if(NOT with_fp8)
      cut(",
                     fp8_variant()" "")
    endif()
    cut("std::vector<BackwardVariant> all_backward_variants() {
    std::vector<BackwardVariant> variants = backward_variants(forward_pingpong);
    variants.push_back(exchange_variant(forward_pingpong));
    variants.push_back(reduce_scatter_variant(forward_pingpong));
    return variants;
}
" "")
    cut("        .backward = all_backward_variants(),
" "")
  elseif(number STREQUAL "b")
    cut("case 64: return small ? f.template operator()<Shape<64, 64, 4, 1>>() : f.template operator()<Shape<64, 64, 4, 2>>();"
        "case 64: return f.template operator()<Shape<64, 64, 4, 1>>();")
    cut("case 128: return small ? f.template operator()<Shape<128, 64, 4, 1>>() : f.template operator()<Shape<128, 64, 4, 2>>();" "")
    cut("Shape<256, 64, 8, 1>" "Shape<64, 64, 4, 1>")
    cut("Shape<256, 32, 4, 1>" "Shape<64, 64, 4, 1>")
    cut("if (p.head_dim == 64) return f.template operator()<Shape<64, 64, 32, 4, 2, 1>>();" "")
    cut("Shape<128, 64, 32, 8, 2, 2>" "Shape<64, 64, 32, 4, 2, 1>")
    cut("Shape<128, 64, 32, 4, 2, 2>" "Shape<64, 64, 32, 4, 2, 1>")
  elseif(number STREQUAL "a")
    foreach(shape "64, 1, 2" "64, 2, 2" "128, 1, 1" "128, 1, 2" "128, 2, 2")
      cut("Shape<${shape}>" "Shape<64, 1, 1>")
    endforeach()
  endif()
  if(number STREQUAL "06") # float16 alone
    cut("namespace {
" "namespace {

template <class F>
void with_f16(const std::string&, workbook::Forward&, F&& run) {
    run.template operator()<__half>();
}
")
    cut("with_tensors(" "with_f16(")
  endif()
  # float16 alone of what tensor cores multiply, float32 alone of the other types, and of the head dimensions of their kernels d = 64 alone.
  string(REPLACE "with_16_bit_type(" "with_half(" text "${text}")
  string(REPLACE "with_type(" "with_float(" text "#include \"attention/one_shape.hpp\"\n${text}")
  string(REPLACE "with_fp32_head_dim(" "with_d64(" text "${text}")
  set(${variable} "${text}" PARENT_SCOPE)
endfunction()
