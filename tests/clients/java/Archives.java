import java.io.*;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.util.*;
import java.util.regex.*;
import java.util.zip.*;

/**
 * Archives of arrays (npz) by the JDK alone.
 *
 * <p>java Archives.java read < answer.npz prints {name: {dtype, shape, values}}; java Archives.java write > request.npz
 */
public final class Archives {
    public static void main(String[] arguments) throws IOException {
        if (arguments[0].equals("write")) {
            write(System.out);
        } else {
            read(System.in);
        }
    }

    /** The archive is read from its first byte on, as from a socket. */
    private static void read(InputStream source) throws IOException {
        List<String> found = new ArrayList<>();
        try (ZipInputStream archive = new ZipInputStream(source)) {
            for (ZipEntry entry; (entry = archive.getNextEntry()) != null; ) {
                found.add("\"" + entry.getName() + "\": " + shown(ByteBuffer.wrap(archive.readAllBytes())));
            }
        }
        System.out.println("{" + String.join(", ", found) + "}");
    }

    private static String shown(ByteBuffer file) {
        file.order(ByteOrder.LITTLE_ENDIAN);
        int length = file.getShort(8);
        String header = new String(file.array(), 10, length, StandardCharsets.US_ASCII);
        Matcher parts = Pattern.compile("'descr': '(.*?)'.*'fortran_order': False.*'shape': \\((.*?),?\\)").matcher(header);
        if (!parts.find()) {
            throw new IllegalArgumentException(header);
        }
        file.position(10 + length);
        List<String> values = new ArrayList<>();
        while (file.hasRemaining()) {
            double value = switch (parts.group(1)) {
                case "<f8" -> file.getDouble();
                case "<f4" -> file.getFloat();
                case "<i8" -> file.getLong();
                case "|u1" -> file.get() & 0xff;
                default -> throw new IllegalArgumentException(header);
            };
            values.add(Double.isInfinite(value) ? "null" : Double.toString(value));
        }
        return "{\"dtype\": \"" + parts.group(1).substring(1) + "\", \"shape\": [" + parts.group(2) + "], \"values\": " + values + "}";
    }

    /** Compressed, the size of each file behind its bytes, numbers with the first byte first: what Java does by itself. */
    private static void write(OutputStream target) throws IOException {
        try (ZipOutputStream archive = new ZipOutputStream(target)) {
            DataOutputStream content = new DataOutputStream(archive);
            archive.putNextEntry(new ZipEntry("input.npy"));
            header(content, "{'descr': '>f8', 'fortran_order': False, 'shape': (2, 2)}");
            for (double number : new double[] {1, 0, 0, 1}) {
                content.writeDouble(number);
            }
            archive.putNextEntry(new ZipEntry("is_causal.npy"));
            header(content, "{'descr': '|b1', 'fortran_order': False, 'shape': ()}");
            content.writeBoolean(true);
            archive.putNextEntry(new ZipEntry("scale.npy"));
            header(content, "{'descr': '>f4', 'fortran_order': False, 'shape': (1,)}");
            content.writeFloat(1);
        }
    }

    private static void header(DataOutputStream content, String text) throws IOException {
        content.write(new byte[] {(byte) 0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, (byte) (text.length() + 1), 0});
        content.writeBytes(text + "\n");
    }
}
