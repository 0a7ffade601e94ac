# cmake -DINPUT=file -DOUTPUT=base -DNAME=symbol -P embed.cmake: writes base.pb.c and base.pb.h with the file's bytes.
file(READ ${INPUT} hex HEX)
string(REGEX REPLACE "(..)" "0x\\1," bytes "${hex}")
string(REGEX REPLACE "(0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,)" "\\1\n" bytes "${bytes}")
get_filename_component(header ${OUTPUT}.pb.h NAME)
file(WRITE ${OUTPUT}.pb.h "/* Generated. */\nextern const unsigned char ${NAME}[];\nextern const unsigned long ${NAME}_len;\n")
file(WRITE ${OUTPUT}.pb.c "/* Generated. */\n#include \"${header}\"\nconst unsigned char ${NAME}[] = {\n${bytes}};\nconst unsigned long ${NAME}_len = sizeof ${NAME};\n")
