/// @file
/// What is thrown when something that was asked for cannot be done.
#pragma once

#include <stdexcept>
#include <string>

namespace workbook {

/// A parameter that no stage accepts: the message names the parameter, the value and what is accepted.
struct InvalidArgument : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

/// A valid problem that this stage or this device cannot do: the message gives the reason and what can.
struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace workbook
