# cmake -DINPUT=file -DOUTPUT=base -DNAME=symbol -P embed.cmake: writes base.c and base.h with the file's bytes.
file(READ ${INPUT} hex HEX)
string(REGEX REPLACE "(..)" "0x\\1," bytes "${hex}")
string(REGEX REPLACE "(0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,)" "\\1\n" bytes "${bytes}")
get_filename_component(header ${OUTPUT}.h NAME)
file(WRITE ${OUTPUT}.h "/* Generated. */\nextern const unsigned char ${NAME}[];\nextern const unsigned long ${NAME}_len;\n")
file(WRITE ${OUTPUT}.c "/* Generated. */\n#include \"${header}\"\nconst unsigned char ${NAME}[] = {\n${bytes}};\nconst unsigned long ${NAME}_len = sizeof ${NAME};\n")
