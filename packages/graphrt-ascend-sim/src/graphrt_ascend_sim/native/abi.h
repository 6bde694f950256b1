// What the C interface of CANN fixes: types of handles, numbers of error codes.
#pragma once

#define API extern "C" __attribute__((visibility("default")))

using aclError = int;
using aclrtStream = void*;
using aclrtEvent = void*;
using aclmdlRI = void*;
using aclrtTaskGrp = void*;

namespace sim {

enum Code : aclError {
    kOk = 0,
    kParameter = 107000,
    kDependency = 107024,
    kUnjoined = 107025,
    kModelCaptured = 107026,
    kStreamCaptured = 107027,
    kEventCaptured = 107028,
    kNotCaptured = 107029,
    kCaptureMode = 107030,
    kImplicitDefault = 107031,
    kConflict = 107032,
    kGroupStatus = 107033,
    kGroupInterrupted = 107034,
    kUnmatched = 107036,
    kModelRunning = 107037,
    kWrongThread = 107038,
    kBlockingCall = 107041,
    kBranchCapturing = 107046,
    kNotSupported = 207000,
    kMemoryAllocation = 207001,
    kNoStreamResource = 207005,
    kQueueFull = 207006,
    kNoEvent = 207007,
    kNoStreamForCapture = 207008,
    kOutOfMemory = 207018,
    kTaskMismatch = 507000,
    kTaskType = 507009,
    kKernelFailed = 507015,
    kTimeout = 507046,
    kInvalidated = 507903,
    kCompileFailed = 500002,
    kNoOperator = 561000,
};

}  // namespace sim
