// Functions that torch_npu 2.13 links against, and that nothing calls on the simulated device:
// profiling, dumps, custom kernels, shared memory. Most of them say so if called.

#include <string>

#include "abi.h"
#include "errors.h"

#define QUIET(name) \
    API long name() { return 0; }
#define REFUSED(name)                                                                      \
    API aclError name() {                                                                  \
        return sim::fail(sim::kNotSupported, std::string("the simulator lacks ") + #name); \
    }

QUIET(HcclSetConfig)
QUIET(MsprofGetHashId)
QUIET(MsprofRegisterCallback)
QUIET(MsprofReportAdditionalInfo)
QUIET(MsprofReportApi)
QUIET(MsprofReportCompactInfo)
QUIET(MsprofSysCycleTime)

QUIET(aclGetTensorDescDimV2)
QUIET(aclGetTensorDescFormat)
QUIET(aclGetTensorDescNumDims)
QUIET(aclGetTensorDescType)
QUIET(aclSetTensorDescName)
QUIET(aclSetTensorFormat)
QUIET(aclSetTensorPlaceMent)
QUIET(aclSetTensorShape)
QUIET(aclopSetAttrBool)
QUIET(aclopSetAttrDataType)
QUIET(aclopSetAttrFloat)
QUIET(aclopSetAttrInt)
QUIET(aclopSetAttrListBool)
QUIET(aclopSetAttrListFloat)
QUIET(aclopSetAttrListInt)
QUIET(aclopSetAttrListListInt)
QUIET(aclopSetAttrString)

REFUSED(aclmdlFinalizeDump)
REFUSED(aclmdlInitDump)
REFUSED(aclmdlSetDump)
REFUSED(aclrtBinaryGetFunction)
REFUSED(aclrtBinaryLoadFromData)
REFUSED(aclrtDeviceGetBareTgid)
REFUSED(aclrtGetFunctionAddr)
REFUSED(aclrtMemExportToShareableHandle)
REFUSED(aclrtMemImportFromShareableHandle)
REFUSED(aclrtMemSetPidToShareableHandle)
REFUSED(rtDevBinaryRegister)
REFUSED(rtFunctionRegister)
REFUSED(rtGetC2cCtrlAddr)
REFUSED(rtKernelLaunch)
