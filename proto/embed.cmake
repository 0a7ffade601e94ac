# cmake -DINPUT=file -DOUTPUT=file.c -DNAME=symbol -P embed.cmake: a file as `const unsigned char NAME[]` and `NAME_len`.
file(READ ${INPUT} hex HEX)
string(LENGTH "${hex}" digits)
math(EXPR len "${digits} / 2")
string(REGEX REPLACE "(..)" "0x\\1," body "${hex}")
string(REGEX REPLACE "(................................................................................)" "\\1\n" body "${body}")
file(WRITE ${OUTPUT} "extern const unsigned char ${NAME}[];\nextern const unsigned long ${NAME}_len;\n"
     "const unsigned char ${NAME}[] = {\n${body}\n};\nconst unsigned long ${NAME}_len = ${len};\n")
